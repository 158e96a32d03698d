"""What users import is frozen: a change here is a change of the contract."""

import inspect
import tomllib
from pathlib import Path

import pytest
import torch

import gradvac
from gradvac.rules import RULES

ROOT = Path(__file__).parents[2]

PUBLIC = {
    "AdamMetric",
    "Aligner",
    "Alignment",
    "Components",
    "EmaTarget",
    "FixedTarget",
    "GradientsByTask",
    "Only",
    "Restored",
    "RowTasks",
    "Rule",
    "Weighing",
    "__version__",
    "rows",
    "rule_named",
} | {rule.__name__ for rule in RULES.values()}  # a rule that is registered is public
RULES_OF_THE_CONTRACT = {"GradVac", "PCGrad", "MGDA", "GradNorm", "Sum", "TorchJD"}
SIGNATURES = {
    "GradVac": "(beta: float = 0.01, target: float | gradvac.rules.pairwise.EmaTarget | "
    "gradvac.rules.pairwise.FixedTarget | None = None, vaccinated: "
    "collections.abc.Sequence[str] | None = None, order: str = 'random', seed: int = 0, "
    "preserve_norm: bool = False) -> None",
    "PCGrad": "(vaccinated: collections.abc.Sequence[str] | None = None, order: str = 'random', "
    "seed: int = 0) -> None",
    "MGDA": "(normalize: str = 'none') -> None",
    "GradNorm": "(alpha: float = 1.5, lr: float = 0.025, component: str | None = None) -> None",
    "Sum": "(weights: collections.abc.Mapping[str, float] | None = None) -> None",
}


def test_names() -> None:
    assert set(gradvac.__all__) == PUBLIC >= RULES_OF_THE_CONTRACT
    assert set(dir(gradvac)) >= PUBLIC
    for name in gradvac.__all__:
        assert getattr(gradvac, name).__doc__, f"gradvac.{name} has no docstring"
    with pytest.raises(AttributeError, match="'Alligner'"):
        gradvac.Alligner  # noqa: B018


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.__name__)
def test_rules_speak_for_themselves(rule: type[gradvac.Rule]) -> None:
    """Configs, the guide and the report take from the class what they say of a rule."""
    assert RULES[rule.name] is rule
    assert rule.does
    assert not rule.does.endswith(".")
    assert ">>> from gradvac" in (rule.__doc__ or "")
    assert set(rule.task_options) <= set(inspect.signature(rule).parameters)


def test_results_with_tensors_compare_by_identity() -> None:
    """`==` of tensors is a tensor, which has no truth value."""
    model = torch.nn.Linear(2, 1)
    aligner = gradvac.Aligner(model, ["a", "b"], gradvac.GradVac(), engine="per_task")
    first, second = (aligner.backward(model(torch.randn(2, 2))[:, 0], ["a", "b"]) for _ in range(2))
    assert first == first
    assert first != second
    assert len({first, second}) == 2
    weighing = gradvac.Weighing(first.weights, first.target, first.active)
    assert weighing != gradvac.Weighing(first.weights, first.target, first.active)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert str(inspect.signature(getattr(gradvac, name))) == SIGNATURES[name]


def test_aligner_signature() -> None:
    parameters = inspect.signature(gradvac.Aligner).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["model", "tasks", "rule", "granularity", "engine"]
    assert parameters["granularity"].default == "all_layer"
    assert parameters["engine"].default == "auto"


def test_version_is_written_once() -> None:
    """Beside its code, where a path without metadata finds it and the package is built from it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"] == {"path": "src/gradvac/__init__.py"}
    sources = [*(ROOT / "src").rglob("*.py"), ROOT / "pyproject.toml"]
    said = [p for p in sources if f'"{gradvac.__version__}"' in p.read_text(encoding="utf-8")]
    assert said == [ROOT / "src" / "gradvac" / "__init__.py"]
    assert (ROOT / "src" / "gradvac" / "py.typed").exists()
