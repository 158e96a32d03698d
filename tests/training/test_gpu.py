"""What only a GPU can show: a step does not wait for it, and skips itself there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradvac.lab.training import Result, checkpoint

from .. import needs

pytestmark = [
    needs.GPU,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_step_does_not_wait_for_the_device(
    tmp_path: Path, settings: Callable[..., Any], run_toy: Callable[..., Result], precision: str
) -> None:
    """Any wait is an error, but for log entries and the looks of steps 1, 2 and 10."""
    config = settings(
        train={"precision": precision, "log_every": 12, "validate_every": 0, "checkpoint_every": 12}
    )

    def watch(step: int, alignment: object) -> None:
        if step in (3, 10):
            torch.cuda.set_sync_debug_mode("error")
        if step in (9, 11):
            torch.cuda.set_sync_debug_mode("default")

    try:
        assert run_toy(config, tmp_path, watch=watch).step == 12
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bad_steps_are_skipped_on_the_device(
    tmp_path: Path, settings: Callable[..., Any], run_toy: Callable[..., Result]
) -> None:
    result = run_toy(settings(), tmp_path, spoil=frozenset({2, 3, 7}))
    assert (result.step, result.skipped_steps) == (12, 3)
    for value in checkpoint.weights(tmp_path, "last").values():
        assert value.isfinite().all()
