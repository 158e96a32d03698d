"""Settings of the engine tests."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradvac.engine import planner
from gradvac.utils.native import native

from .. import needs

# The tensors are tiny: a second thread would only wait.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Whatever ran before, and in whichever process."""
    torch.manual_seed(0)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    """What another test compiled is forgotten."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _slow_places_are_no_news() -> None:
    """Most models of the zoo are there because of them."""
    warnings.filterwarnings("ignore", message=".*no fast path")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every probe of a graph."""
    found: list[int] = []
    take = planner.probe

    def counted(*given: Any) -> Any:
        found.append(1)
        return take(*given)

    monkeypatch.setattr(planner, "probe", counted)
    return found


@pytest.fixture
def kernels(
    made_once: Callable[[str, Callable[[Path], object]], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The module, in use."""
    needs.cpp_compiler()
    monkeypatch.setenv("GRADVAC_NATIVE", "1")
    native.cache_clear()

    def build(folder: Path) -> None:  # by one worker while the others wait
        native()
        folder.mkdir()

    made_once("native", build)
    module = native()
    assert module is not None, "was not built; the log says why"
    yield module
    native.cache_clear()
