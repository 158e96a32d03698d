"""Tagging on a GPU: steps that are replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradvac.tagging import TaggingConfig, train_tagging
from gradvac.training import checkpoint

from ..shown import Shown

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("rule", ["sum", "gradvac", "pcgrad", "gradnorm", "mgda"])
def test_recorded_steps_equal_those_as_written(
    settings: Callable[..., TaggingConfig], tmp_path: Path, shown: Shown, rule: str
) -> None:
    base = settings()
    for graph in (True, False):
        config = settings(
            model={"encoder": base.model.encoder, "max_tokens": 32, "dropout": 0.0},
            batch={"rows": 24, "epochs": 0.0, "fixed": True},
            align={"rule": rule},
            train=base.train.model_dump()
            | {"device": "cuda", "precision": "bf16", "graph": graph, "max_steps": 25},
        )
        train_tagging(config, tmp_path / str(graph), display=shown)
    recorded, written = (checkpoint.weights(tmp_path / str(g), "last") for g in (True, False))
    for name, value in written.items():  # additions on the device come in any order
        assert (recorded[name] - value).norm() < 2e-2 * value.norm(), name
