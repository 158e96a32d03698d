"""The config of a sweep, and the runs it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradvac.lab.experiments import SweepConfig, plan_trials

OUT = Path("out")


def config(**parts: Any) -> SweepConfig:
    return SweepConfig.model_validate({"recipe": "nmt", "base": "twin", **parts})


def test_a_grid_is_every_combination() -> None:
    grid = {"align.rule": ["sum", "gradvac"], "batch.rows": [16, 32], "train.seed": [0, 1]}
    trials = plan_trials(config(grid=grid), OUT)
    assert len(trials) == 8
    assert [str(trial.run) for trial in trials[:3]] == [
        "out/sum-rows=16/seed-0",
        "out/sum-rows=32/seed-0",
        "out/gradvac-rows=16/seed-0",
    ]
    assert trials[0].settings == {"align.rule": "sum", "batch.rows": 16, "train.seed": 0}
    assert {trial.method for trial in trials} == {"sum", "gradvac"}


def test_methods_have_grids_of_their_own() -> None:
    methods = [
        {
            "name": "joint",
            "set": {"align.rule": "sum"},
            "grid": {"sampling.temperature": [1.0, 5.0]},
        },
        {"name": "weighted", "set": {"align.weights": {"low": 0.5}, "train.seed": 7}},
        {"name": "bilingual", "parts": {"data.tasks": [["en-fr"], ["en-hi"]]}},
    ]
    found = plan_trials(
        config(methods=methods, grid={"train.seed": [0, 1]}), OUT, {"train.max_steps": 9}
    )
    assert [str(trial.run) for trial in found] == [
        "out/joint-temperature=1.0/seed-0",
        "out/joint-temperature=5.0/seed-0",
        "out/bilingual+en-fr/seed-0",
        "out/bilingual+en-hi/seed-0",
        "out/joint-temperature=1.0/seed-1",
        "out/joint-temperature=5.0/seed-1",
        "out/bilingual+en-fr/seed-1",
        "out/bilingual+en-hi/seed-1",
        "out/weighted/seed-7",
    ]
    assert all(trial.settings["train.max_steps"] == 9 for trial in found)


def test_runs_come_after_those_they_need() -> None:
    methods = [
        {"name": "frozen", "set": {"align.options": {"run": "{run:vac}"}}},
        {"name": "after", "set": {"model.init": "{run:first}", "data.prepared": "{out}/d-{seed}"}},
        {"name": "first", "scored": False},
        {"name": "vac"},
    ]
    found = plan_trials(config(methods=methods, grid={"train.seed": [3]}), OUT)
    assert [trial.name for trial in found] == ["first", "after", "vac", "frozen"]
    after, frozen = found[1], found[3]
    assert after.needs == (OUT / "first" / "seed-3",)
    assert after.settings["model.init"] == "out/first/seed-3"
    assert after.settings["data.prepared"] == "out/d-3"
    assert frozen.settings["align.options"] == {"run": "out/vac/seed-3"}


def test_methods_take_turns_and_seeds_come_one_after_the_other() -> None:
    methods = [
        {"name": "late", "turn": 2},
        {"name": "many", "grid": {"train.seed": [0, 1, 2]}},
        {"name": "few"},
    ]
    found = plan_trials(config(methods=methods, grid={"train.seed": [0, 1]}), OUT)
    labels = [f"{trial.name}{trial.seed}" for trial in found]
    assert labels == ["many0", "few0", "many1", "few1", "many2", "late0", "late1"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"methods": [{"name": "a"}, {"name": "a"}]}, "twice"),
        ({"methods": [{"name": "a b"}]}, "'a b' .*letters, digits"),
        ({"grid": {"train.seed": []}}, "at least one"),
        ({"grid": {"optimizer.lr": [1, 1.0]}}, "each once"),
        ({"grid": {"train.seed": [0]}, "set": {"train.seed": 1}}, r"train.seed .*\[set\]"),
        ({"methods": [{"name": "a", "set": {"x.y": 1}, "grid": {"x.y": [2]}}]}, "sets and varies"),
        (
            {"methods": [{"name": "a", "set": {"model.init": "{run:frist}"}}, {"name": "first"}]},
            "first",
        ),
        (
            {
                "methods": [
                    {"name": "a", "set": {"model.init": "{run:b}"}},
                    {"name": "b", "set": {"model.init": "{run:a}"}},
                ]
            },
            "circle",
        ),
        (
            {"methods": [{"name": "joint"}], "primary": [{"method": "gradvca"}]},
            "primary: there is no method 'gradvca'",
        ),
        ({"methods": [{"name": "a", "parts": {"x.y": [1], "x.z": [2]}}]}, "give one"),
    ],
)
def test_mistakes_are_told(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_trials(config(**parts), OUT)
