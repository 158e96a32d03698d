"""[align] builds the aligner it describes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from gradvac.training import AlignConfig

TASKS = ("fr", "hi", "tr")
LEVELS = {"fr": "high", "hi": "low", "tr": "low"}


def build(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return AlignConfig(**options).build(model, TASKS, LEVELS, seed=3)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "GradVac(EmaTarget(beta=0.01), vaccinated=all, order='random', seed=3"),
        ({"beta": 0.1, "seed": 5, "preserve_norm": True}, "EmaTarget(beta=0.1), vaccinated=all"),
        ({"target": 0.5, "order": "fixed"}, "vaccinated=all, order='fixed', seed=3"),
        ({"rule": "pcgrad", "vaccinated": "high"}, "PCGrad(vaccinated=['fr'], order='random'"),
        ({"rule": "mgda", "normalize": "loss+"}, "MGDA(normalize='loss+')"),
        ({"rule": "gradnorm", "alpha": 0.5, "weight_lr": 0.1}, "GradNorm(alpha=0.5, lr=0.1"),
        ({"rule": "sum"}, "Sum()"),
    ],
)
def test_rule_gets_its_settings(options: dict[str, Any], rule: str) -> None:
    assert rule in repr(build(**options).rule)


@pytest.mark.parametrize(
    ("vaccinated", "chosen"),
    [
        ("all", None),
        (["all"], None),
        ("low", ("hi", "tr")),
        (["tr", "fr"], ("fr", "tr")),
        (["high", "tr"], ("fr", "tr")),
    ],
)
def test_vaccinated_by_task_and_by_level(vaccinated: Any, chosen: Any) -> None:
    assert build(vaccinated=vaccinated).rule.vaccinated == chosen


def test_weights_by_level_yield_to_those_of_a_task() -> None:
    assert build(rule="sum", weights={"hi": 2.0, "low": 0.5}).rule.weights == {"hi": 2.0, "tr": 0.5}


@pytest.mark.parametrize("key", ["vaccinated", "weights"])
def test_unknown_task_or_level_is_named_with_what_there_is(key: str) -> None:
    value: Any = {"medium": 1.0} if key == "weights" else "medium"
    rule = "sum" if key == "weights" else "gradvac"
    with pytest.raises(ValueError, match=rf"align\.{key}: 'medium' .*fr, hi, tr.*high, low"):
        build(rule=rule, **{key: value})


def test_granularity_and_engine_reach_the_aligner() -> None:
    aligner = build(granularity="whole_model", engine="per_task", storage_dtype="bfloat16")
    assert list(aligner.components) == ["model"]
    assert aligner.engine == "per_task"


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ({}, []),
        ({"beta": 0.1, "vaccinated": "low"}, []),
        ({"rule": "sum", "beta": 0.1, "vaccinated": "low"}, ["beta", "vaccinated"]),
        ({"rule": "gradvac", "weights": {"fr": 1.0}}, ["weights"]),
        ({"target": 0.5, "beta": 0.1}, ["beta"]),
    ],
)
def test_settings_without_effect_are_known(options: dict[str, Any], unused: list[str]) -> None:
    assert AlignConfig(**options).unused() == unused


def test_description_holds_what_differs_from_the_default() -> None:
    assert AlignConfig().describe_rule() == "gradvac"
    changed = AlignConfig(beta=0.1, vaccinated=["hi", "tr"], normalize="l2")
    assert changed.describe_rule() == "gradvac(beta=0.1,vaccinated=['hi','tr'])"
