"""The sweeps that come with the project: all can be planned, and the small one is run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from gradvac.analysis.record import read_record
from gradvac.lab.experiments import Sweep, SweepConfig, compare_runs, to_markdown
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import RunConfig
from gradvac.lab.training.config import load

from .conftest import ROOT, InProcess

CONFIGS = sorted((ROOT / "configs" / "sweeps").glob("*.toml"))


def plan(path: Path, out: Path, **extra: object) -> Sweep:
    config = load(SweepConfig, path)
    base = ROOT / "configs" / config.recipe / f"{config.base}.toml"
    return Sweep(config, base, out, extra={"train.seed": 0} | extra)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_sweep_can_be_planned(path: Path, tmp_path: Path) -> None:
    """Which loads the settings of all its runs; and its first lines say how to start it."""
    assert plan(path, tmp_path).trials
    assert f"gradvac sweep {path.stem}" in path.read_text(encoding="utf-8")


def test_every_config_names_its_rule() -> None:
    """So that the paper's settings do not follow the default."""
    paths = [
        path for kind in ("nmt", "tagging") for path in (ROOT / "configs" / kind).glob("*.toml")
    ]
    rules = {path.stem: tomllib.loads(path.read_text("utf-8"))["align"]["rule"] for path in paths}
    paper = {"wmt4", "tatoeba", "massive25", "pos", "ner"}
    assert {rules[name] for name in paper} == {"gradvac"}
    assert rules["own"] == RunConfig().align.rule


def test_the_twin_of_table_1_runs_from_data_to_table(
    tmp_path: Path, prepared: Path, sources: dict[str, str]
) -> None:
    """Bilingual models, controls, frozen weights, a cap on epochs, and a start from other runs."""
    few = {"train.max_steps": 4, "decoding.max_ratio": 0.1} | sources
    made = plan(ROOT / "configs" / "sweeps" / "twin.toml", tmp_path, **few)
    for trial in made.trials:
        if "data.prepared" not in trial.settings:
            trial.settings["data.prepared"] = str(prepared)  # type: ignore[index]
    ended = made.run(InProcess())
    assert {trial.label: how.error for trial, how in ended.items() if how.status != "done"} == {}
    found = compare_runs([tmp_path])
    assert found.baseline == "joint"
    methods = {"joint", "bilingual", "gradvac", "norm", "frozen", "unimax", "high_then_joint"}
    assert set(found.seeds) == methods
    assert set(found.rows[0].cells) == methods  # an average of each, bilingual models together
    assert "| bilingual | 1 |" in to_markdown(found)
    records = [
        read_record(RunFolder(tmp_path / n / "seed-0").record) for n in ("gradvac", "frozen")
    ]
    means = np.nanmean(records[0].weights, 0)
    np.testing.assert_allclose(np.nanmean(records[1].weights, 0), means, atol=1e-5)
