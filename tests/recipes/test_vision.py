"""A recipe of one's own, examples/vision_recipe.py: trained, scored, swept, compared, measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gradvac.cli.commands import app
from gradvac.lab.recipes import recipe_named, recipe_of
from gradvac.lab.training import BatchSlice, RowBatch, config

EXAMPLE = Path(__file__).parents[2] / "examples" / "vision_recipe.py"
BASE = """
[optimizer]
lr = 3e-3
warmup_steps = 5

[train]
max_steps = 80
validate_every = 40
checkpoint_every = 40
log_every = 20
device = "cpu"
writers = []
"""
SWEEP = f"""
recipe = "{EXAMPLE}:VISION"
base = "base.toml"
score = ["test"]

[grid]
"train.seed" = [0, 1]

[[methods]]
name = "joint"
set = {{ "align.rule" = "sum" }}

[[methods]]
name = "gradvac"
set = {{ "align.rule" = "gradvac" }}
"""


def test_a_sweep_of_two_vision_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(BASE)
    Path("vision.toml").write_text(SWEEP)
    runner = CliRunner()

    def gradvac(*arguments: str) -> str:
        done = runner.invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    gradvac("sweep", "vision.toml", "--out", "runs", "--jobs", "2")
    compared = json.loads(gradvac("compare", "runs", "--json"))
    assert "accuracy" in json.dumps(compared)
    run = Path("runs/gradvac/seed-0")
    assert recipe_of(run) == f"{EXAMPLE}:VISION"
    scores = recipe_named(recipe_of(run)).score(run, split="dev")
    assert scores.by_task["upright"]["accuracy"] > 60
    assert set(scores.to_dict()["means"]) == {"accuracy"}
    assert "upright" in str(scores.table().columns[0]._cells)
    for engine in ("per_task", "one_backward"):
        shown = gradvac("similarity", str(run), "--engine", engine, "--lines", "40")
        assert "whole_model" in shown
        (run / "similarity.npz").rename(tmp_path / engine)
    gradvac("report", str(run), "--out", "report.html")
    assert Path("report.html").stat().st_size > 100_000


def test_recipes_that_are_not_there_are_told(tmp_path: Path) -> None:
    for name, what in (
        ("vision", "nmt, tagging"),
        ("nowhere.module:NAME", "'nowhere.module'"),
        (f"{tmp_path}/none.py:NAME", "no file"),
        ("gradvac.tasks:parse", "'parse'"),
    ):
        with pytest.raises(ValueError, match=what):
            recipe_named(name)


def test_the_settings_of_a_recipe_load_like_all_others(tmp_path: Path) -> None:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    settings = config.load(recipe_named(f"{EXAMPLE}:VISION").settings, path, ["data.noise=0.1"])
    assert settings.model_dump()["data"]["noise"] == 0.1


def test_parts_of_a_batch_of_rows() -> None:
    batch = RowBatch(tasks=[0, 0, 1, 1, 1], num_tokens=5)
    parts = [batch.take(BatchSlice(number, 2)) for number in range(2)]
    assert [task for part in parts for task in part.tasks] == batch.tasks
    assert {part.num_tokens for part in parts} == {5}
    assert batch.to(torch.device("cpu")).tasks == batch.tasks
