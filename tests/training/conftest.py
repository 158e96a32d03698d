"""Fixtures of the training floor: a toy recipe, and runs that finish in a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gradvac.lab.training import Result, train

from ..shown import Shown
from . import toy as toy_module


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """The module `toy.py` beside this file."""
    return toy_module


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def settings(toy: ModuleType) -> Callable[..., Any]:
    """A short run's config; keyword arguments are sections that are merged in."""

    def make(**sections: dict[str, Any]) -> Any:
        base: dict[str, dict[str, Any]] = {
            "train": {
                "max_steps": 12,
                "log_every": 3,
                "validate_every": 4,
                "checkpoint_every": 4,
                "writers": [],
            },
            "optimizer": {"warmup_steps": 4, "lr": 1e-2},
            "align": {"rule": "gradvac"},  # with a state that steps change
        }
        for name, section in sections.items():
            base[name] = base.get(name, {}) | section
        return toy.ToyConfig.model_validate(base)

    return make


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def run_toy(toy: ModuleType, shown: Shown) -> Callable[..., Result]:
    """Trains the toy recipe; keyword arguments go to `ToyRecipe` and to `train`."""

    def run(config: Any, folder: Path, *, watch: Any = None, **recipe: Any) -> Result:
        return train(toy.ToyRecipe(config, **recipe), config, folder, display=shown, watch=watch)

    return run
