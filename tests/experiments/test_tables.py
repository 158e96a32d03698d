"""The tables of the results page: of methods that the sweep has, on the seeds they share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from gradvac.experiments import SweepConfig
from gradvac.training.config import load

from .conftest import ROOT
from .made_runs import make_run


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    path = ROOT / "docs" / "results" / "write_tables.py"
    spec = importlib.util.spec_from_file_location("write_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_method_is_one_of_the_sweep_and_none_is_forgotten(tables: ModuleType) -> None:
    methods = load(SweepConfig, ROOT / "configs" / "sweeps" / "one_gpu.toml").methods
    asked = {name for question in tables.QUESTIONS for name in question.methods}
    assert asked == {method.name for method in methods if method.scored}


def test_methods_are_compared_on_the_seeds_they_share(tables: ModuleType, tmp_path: Path) -> None:
    """GradVac has three seeds, joint two of them, PCGrad one: too few."""
    have = {"joint": ("sum", (0, 2)), "gradvac": ("gradvac", (0, 1, 2)), "pcgrad": ("pcgrad", (0,))}
    for name, (rule, seeds) in have.items():
        for seed in seeds:
            make_run(tmp_path / "runs" / name / f"seed-{seed}", rule=rule, seed=seed)
    (tmp_path / "out").mkdir()
    question = tables.Question("one", "Who wins?", ("joint", "gradvac", "pcgrad"))
    said = tables.write_question(question, tmp_path / "runs", tmp_path / "out")
    assert said == "one: 2 methods, 2 seeds"
    text = (tmp_path / "out" / "one.md").read_text()
    assert text.startswith(
        "# Who wins?\n\nLeft out, as fewer than two seeds were finished: pcgrad."
    )
    assert "| gradvac | 2 |" in text
    none = tables.Question("two", "And here?", ("pcgrad", "joint"))
    assert "no table" in tables.write_question(none, tmp_path / "runs", tmp_path / "out")


def test_a_seed_with_a_missing_part_does_not_count(tables: ModuleType, tmp_path: Path) -> None:
    for part, seeds in (("en-fr", (0, 1)), ("en-hi", (0,))):
        for seed in seeds:
            run = tmp_path / f"bilingual+{part}" / f"seed-{seed}"
            make_run(run, seed=seed, tasks={part: "low"})
    assert set(tables.seeds_of(tmp_path, "bilingual")) == {0}
