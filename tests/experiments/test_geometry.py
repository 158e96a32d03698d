"""The claims about similarities: what was planted is found in every seed, and noise is not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gradvac.analysis import Similarities, save_similarities
from gradvac.files import write_json
from gradvac.lab.runs import RunFolder

from ..drivers import load_module
from .conftest import ROOT

LANGUAGES = ("de", "da", "es", "it", "cs", "hr", "sw", "sn", "fi", "et", "hi", "mr")
FAMILIES = (0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
LAYERS = ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1")


@pytest.fixture(scope="module")
def geometry() -> ModuleType:
    folder = ROOT / "docs" / "results"
    sys.path.insert(0, str(folder))
    return load_module(folder / "geometry.py")


def make(run: Path, *, into: bool, level: float, kin: float, seed: int) -> None:
    """A run whose tasks have this cosine, relatives more by `kin`, and seeds a little noise."""
    tasks = tuple(f"{code}-en" if into else f"en-{code}" for code in LANGUAGES)
    draw = np.random.default_rng([seed, into])
    values = draw.normal(level, 0.005, (2, len(LAYERS), len(tasks), len(tasks)))
    relatives = np.equal.outer(FAMILIES, FAMILIES)
    values = (values + values.swapaxes(-1, -2)) / 2 + kin * relatives
    values[..., range(len(tasks)), range(len(tasks))] = 1.0
    halves = values[..., 0].astype(np.float32)
    found = [
        Similarities(
            tasks, LAYERS, np.array([10, 20]), values.astype(np.float32), halves, lines=lines
        )
        for lines in ("same", "different")
    ]
    run.mkdir(parents=True)
    save_similarities(RunFolder(run).similarity, found)
    ended = run.parents[1] / "trials" / f"{run.parent.name}.{run.name}.result.json"
    ended.parent.mkdir(exist_ok=True)
    write_json(ended, {"reason": "finished"})


def test_what_is_planted_is_found_and_noise_is_not(
    geometry: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(3):
        make(tmp_path / f"into_english/seed-{seed}", into=True, level=0.7, kin=0.1, seed=seed)
        make(tmp_path / f"from_english/seed-{seed}", into=False, level=0.2, kin=0.0, seed=seed)
    for seed in range(2):  # one is not done: no claim
        make(tmp_path / f"tiny/seed-{seed}", into=False, level=0.2, kin=0.0, seed=seed)
    (tmp_path / "trials" / "tiny.seed-0.result.json").unlink()
    (tmp_path / "out").mkdir()
    geometry.main([str(tmp_path), "--out", str(tmp_path / "out")])
    table = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[2:] if row]
    said = {row[0].lstrip("| "): row[1:] for row in table}
    verdicts = {claim: cells[0].strip("*") for claim, cells in said.items()}
    assert verdicts["Families (1), verses: into English, encoder"] == "clear"
    assert verdicts["Families (10), verses: from English, decoder"].startswith("not shown")
    assert verdicts["Into minus from English (2a), two models"] == "clear"
    assert said["Into minus from English (2a), two models"][3] == "66 of 66 pairs |"
    assert verdicts["Decoder minus encoder (4a), from English, verses"].startswith("not shown")
    assert not any("tiny" in claim or "news" in claim for claim in said)
    page = (tmp_path / "out" / "geometry.md").read_text()
    assert "| into_english | 3 | 12 into English | encoder | 0.71" in page


def test_what_seeds_share_must_also_hold_over_languages(
    geometry: ModuleType, tmp_path: Path
) -> None:
    """Languages that happen to be alike in all seeds are no families."""
    for seed in range(3):
        make(tmp_path / f"into_english/seed-{seed}", into=True, level=0.7, kin=0.1, seed=seed)
    kinds = geometry.read_kinds([tmp_path])
    others = dict(zip((f"{code}-en" for code in LANGUAGES), "abcdefabcdef", strict=True))
    for run in kinds["into_english"].values():
        run.families.update(others)
    start = "| Families (1), verses: into English, encoder | **not shown"
    assert start in geometry.claim_table(kinds)


def test_seeds_give_an_interval(geometry: ModuleType) -> None:
    """One seed gives none."""
    assert np.isnan(geometry.over_seeds([1.0]).p_value)
    assert geometry._numbers(geometry.over_seeds([1.0]), 1) == ("+1.000", "1")
    found = geometry.over_seeds([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.reach == pytest.approx(4.302653 / np.sqrt(3))
    assert found.p_value == pytest.approx(0.0741799)
    assert geometry._verdict(1, found, 0.01, 0.2) == "suggestive"
    sure = geometry.over_seeds([1.0, 1.01, 1.02])
    assert geometry._verdict(-1, sure, 0.001, 0.01) == "clear, against the paper"
    assert geometry._verdict(1, sure, 0.3, 1.0) == "not shown over languages"
