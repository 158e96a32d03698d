"""What users import is frozen: a change here is a change of the contract."""

import importlib
import inspect
from importlib.metadata import version
from pathlib import Path

import pytest

import gradvac

ROOT = Path(__file__).parents[2]

PUBLIC = {
    "gradvac": {
        "Aligner",
        "Alignment",
        "EmaTarget",
        "FixedTarget",
        "GradNorm",
        "GradVac",
        "MGDA",
        "PCGrad",
        "Sum",
        "TorchJD",
        "rows",
    },
}
SIGNATURES = {
    "GradVac": "(beta: float = 0.01, target: float | gradvac.rules._targets.EmaTarget | "
    "gradvac.rules._targets.FixedTarget | None = None, vaccinated: "
    "collections.abc.Sequence[str] | None = None, order: str = 'random', seed: int = 0, "
    "preserve_norm: bool = False) -> None",
    "PCGrad": "(vaccinated: collections.abc.Sequence[str] | None = None, order: str = 'random', "
    "seed: int = 0) -> None",
    "MGDA": "(normalize: str = 'none') -> None",
    "GradNorm": "(alpha: float = 1.5, lr: float = 0.025, component: str | None = None) -> None",
    "Sum": "(weights: collections.abc.Mapping[str, float] | None = None) -> None",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_names(module: str) -> None:
    found = importlib.import_module(module)
    assert set(found.__all__) == PUBLIC[module]
    for name in found.__all__:
        assert getattr(found, name).__doc__, f"{module}.{name} has no docstring"


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
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{version("gradvac")}"' in text
    assert (ROOT / "src" / "gradvac" / "py.typed").exists()
