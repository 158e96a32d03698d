"""Settings of the engine tests."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradvac.engine import planner

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
