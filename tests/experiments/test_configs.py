"""The sweeps that come with the project: all can be planned, and the small one is run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gradvac.lab.experiments import Sweep, SweepConfig, compare_runs, to_markdown
from gradvac.lab.experiments.frozen import mean_weights
from gradvac.lab.runs import RunFolder
from gradvac.lab.training.config import load

from .conftest import ROOT, InProcess

CONFIGS = sorted((ROOT / "configs" / "sweeps").glob("*.toml"))


def plan(path: Path, out: Path, **extra: object) -> Sweep:
    config = load(SweepConfig, path)
    base = ROOT / "configs" / config.recipe / f"{config.base}.toml"
    return Sweep(config, base, out, extra={"train.seed": 0} | extra, say=lambda _: None)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_sweep_can_be_planned(path: Path, tmp_path: Path) -> None:
    """Which loads the settings of all its runs; and its first lines say how to start it."""
    assert plan(path, tmp_path).trials
    assert f"gradvac sweep {path.stem}" in path.read_text(encoding="utf-8")


def test_the_twin_of_table_1_runs_from_data_to_table(
    tmp_path: Path, sources: dict[str, str]
) -> None:
    """Bilingual models, controls, frozen weights, a cap on epochs, and a start from other runs."""
    few = {"train.max_steps": 4, "decoding.max_ratio": 0.1} | sources
    made = plan(ROOT / "configs" / "sweeps" / "twin.toml", tmp_path, **few)
    for trial in made.trials:
        if "data.prepared" not in trial.settings:
            trial.settings["data.prepared"] = str(tmp_path / "data")  # type: ignore[index]
    ended = made.run(InProcess())
    assert {trial.label: how.error for trial, how in ended.items() if how.status != "done"} == {}
    found = compare_runs([tmp_path])
    assert found.baseline == "joint"
    methods = {"joint", "bilingual", "gradvac", "norm", "frozen", "unimax", "high_then_joint"}
    assert set(found.seeds) == methods
    assert set(found.rows[0].cells) == methods  # an average of each, bilingual models together
    assert "| bilingual | 1 |" in to_markdown(found)
    settings = tomllib.loads(RunFolder(tmp_path / "frozen" / "seed-0").read_settings())
    assert settings["align"]["component_weights"] == mean_weights(tmp_path / "gradvac" / "seed-0")
