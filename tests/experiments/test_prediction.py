"""How far short runs predict long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..drivers import load_module
from .conftest import ROOT
from .made_runs import make_run

script = load_module(ROOT / "docs" / "results" / "prediction.py")

# At steps 10, 20, 30, 40: the order of step 10 is turned round, that of step 30 is the end's.
LOSSES = {
    "a": (3.0, 2.9, 2.0, 1.0),
    "b": (2.9, 2.8, 2.1, 1.2),
    "c": (2.8, 2.7, 2.2, 1.3),
    "d": (2.7, 3.0, 2.3, 1.6),
}


def points(folder: Path, names: str) -> dict[str, list[Path]]:
    return {name: [make_run(folder / name / "seed-0", losses=LOSSES[name])] for name in names}


def test_ranks_and_what_choosing_early_costs(tmp_path: Path) -> None:
    found = script.predictions(points(tmp_path, "abcd"))
    assert [one.step for one in found] == [10, 20, 30]
    assert [one.rank_correlation for one in found] == pytest.approx([-1.0, 0.2, 1.0])
    assert [one.lost for one in found] == pytest.approx([0.6, 0.3, 0.0])
    assert "| 10 | -1.00 | 0.6000 |" in script.prediction_table(found)


def test_few_points_have_no_order(tmp_path: Path) -> None:
    assert script.predictions(points(tmp_path, "abc")) == []
