"""[align] builds the aligner it describes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradvac.lab.training import AlignConfig, ConfigError, RunConfig, config
from gradvac.rules import RULES

CONTROL = "studies/controls.py:Control"
TASKS = ("fr", "hi", "tr")
LEVELS = {"fr": "high", "hi": "low", "tr": "low"}


def build(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return AlignConfig(**options).build(model, TASKS, LEVELS, seed=3)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "Sum()"),
        (
            {"rule": "gradvac"},
            "GradVac(EmaTarget(beta=0.01), vaccinated=all, order='random', seed=3",
        ),
        (
            {"rule": "gradvac", "beta": 0.1, "seed": 5, "preserve_norm": True},
            "EmaTarget(beta=0.1), vaccinated=all",
        ),
        (
            {"rule": "gradvac", "target": 0.5, "order": "fixed"},
            "vaccinated=all, order='fixed', seed=3",
        ),
        ({"rule": "pcgrad", "vaccinated": "high"}, "PCGrad(vaccinated=['fr'], order='random'"),
        ({"rule": "mgda", "normalize": "loss+"}, "MGDA(normalize='loss+')"),
        ({"rule": "gradnorm", "alpha": 0.5, "weight_lr": 0.1}, "GradNorm(alpha=0.5, lr=0.1"),
        ({"only": ["0"], "until_step": 9}, "Only(Sum()"),
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
    assert build(rule="gradvac", vaccinated=vaccinated).rule.vaccinated == chosen


def test_weights_by_level_yield_to_those_of_a_task() -> None:
    assert build(rule="sum", weights={"hi": 2.0, "low": 0.5}).rule.weights == {"hi": 2.0, "tr": 0.5}


@pytest.mark.parametrize("key", ["vaccinated", "weights"])
def test_unknown_task_or_level_is_named_with_what_there_is(key: str) -> None:
    value: Any = {"medium": 1.0} if key == "weights" else "medium"
    rule = "sum" if key == "weights" else "gradvac"
    with pytest.raises(ValueError, match=rf"align\.{key}: 'medium' .*fr, hi, tr.*high, low"):
        build(rule=rule, **{key: value})


def test_space_reaches_the_aligner_and_the_signature() -> None:
    align = AlignConfig(rule="gradvac", space="preconditioned")
    model = nn.Sequential(nn.Linear(2, 2))
    aligner = align.build(model, TASKS, optimizer=torch.optim.AdamW(model.parameters()))
    assert "metric=AdamMetric(AdamW)" in repr(aligner)
    assert align.describe_rule() == "gradvac(space=preconditioned)"
    with pytest.raises(ValueError, match=r"align\.space: .*optimizer"):
        align.build(model, TASKS)


def test_granularity_and_engine_reach_the_aligner() -> None:
    aligner = build(granularity="whole_model", engine="per_task", storage_dtype="bfloat16")
    assert list(aligner.components) == ["model"]
    assert aligner.engine == "per_task"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "sum", "beta": 0.1, "vaccinated": "low"}, "beta: .*weights"),
        ({"rule": "gradvac", "weights": {"fr": 1.0}}, "weights: .*beta, target"),
        ({"rule": "gradvac", "target": 0.5, "beta": 0.1}, "beta: .*ignored"),
        ({"rule": "gradvac", "beta": 2.0}, "beta: .*0, 1"),
        ({"rule": "gradnorm", "weight_lr": 0.0}, "weight_lr: .*positive"),
        ({"rule": "torchjd"}, "weighting: "),
        ({"rule": "torchjd", "weighting": "UpGard"}, "weighting: .*'UpGard'"),
        ({"rule": "mean"}, "'mean'"),
        ({"rule": "none", "only": ["0"]}, "only: .*no rule"),
        ({"rule": "none", "space": "preconditioned"}, "space: .*no rule"),
        ({"recompute": True, "space": "preconditioned"}, "recompute"),
        ({"rule": CONTROL, "beta": 0.1}, "beta: .*takes options"),
        ({"options": {"beta": 0.1}}, "options: .*weights"),
        ({"rule": CONTROL, "options": {"contol": "norm"}}, "contol: .*'control'"),
        ({"rule": CONTROL, "options": {"control": "sign"}}, "control: .*norm"),
        ({"rule": "studies/missing.py:Rule"}, "studies/missing.py"),
        ({"from_step": 5, "until_step": 3}, "until_step: .*never"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AlignConfig(**options)


def test_every_rule_can_be_configured() -> None:
    """A rule in the registry has its arguments in [align], with its own defaults."""
    for name, rule in RULES.items():
        given = {"torchjd": {"weighting": "Mean"}}.get(name, {})
        settings = AlignConfig(rule=name, **given)
        made = settings.build_rule(TASKS, LEVELS, seed=0)
        assert type(made) is rule
        assert settings.describe_rule().partition("(")[0] == name
        if not given:
            assert repr(made) == repr(rule())
        arguments = set(inspect.signature(rule).parameters) - {"seed"}
        renamed = {"lr": "weight_lr", "options": "weighting_options"}
        assert {renamed.get(one, one) for one in arguments} <= set(AlignConfig.model_fields)


def test_rules_of_ones_own_take_options() -> None:
    """Tasks by resource level, a seed if the rule has one, and limits as for any rule."""
    align = {"rule": CONTROL, "options": {"control": "random", "vaccinated": "low"}}
    rule = build(**align).rule
    assert (rule.control, rule.vaccinated, rule.seed) == ("random", ("hi", "tr"), 3)
    assert AlignConfig(**align).describe_rule() == f"{CONTROL}(control=random,vaccinated=low)"
    assert repr(build(**align, only=["0"]).rule).startswith("Only(Control('random'")


def test_torchjd_weightings_by_name() -> None:
    aligner = build(rule="torchjd", weighting="Krum", weighting_options={"n_byzantine": 0})
    assert aligner.rule.weighting.n_byzantine == 0
    assert "MeanWeighting" in repr(build(rule="torchjd", weighting="MeanWeighting").rule)
    with pytest.raises(ValueError, match=r"weighting: MeanWeighting .*'wrong'"):
        AlignConfig(rule="torchjd", weighting="mean", weighting_options={"wrong": 1})


def test_another_rule_sets_the_files_own_settings_aside(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[align]\nrule = "gradvac"\nbeta = 0.1\nvaccinated = "low"\norder = "fixed"\n')
    assert config.load(RunConfig, path).align.beta == 0.1
    assert config.load(RunConfig, path, ["align.rule=sum"]).align.describe_rule() == "sum"
    pcgrad = config.load(RunConfig, path, ["align.rule=pcgrad"]).align.describe_rule()
    assert pcgrad == "pcgrad(vaccinated=low,order=fixed)"  # what both have stays
    with pytest.raises(ConfigError, match=r"align.beta=0.2: align.beta: .*'sum'"):
        config.load(RunConfig, path, ["align.rule=sum", "align.beta=0.2"])
    path.write_text('[align]\nrule = "sum"\nbeta = 0.1\n')
    with pytest.raises(ConfigError, match=r"run.toml: align.beta: .*weights"):
        config.load(RunConfig, path)


def test_description_holds_what_differs_from_the_default() -> None:
    assert AlignConfig().describe_rule() == "sum"
    changed = AlignConfig(rule="gradvac", beta=0.1, vaccinated=["hi", "tr"])
    assert changed.describe_rule() == "gradvac(beta=0.1,vaccinated=['hi','tr'])"
