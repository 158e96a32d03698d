"""A trainer on a GPU: steps that are replayed as CUDA graphs equal those as written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradvac.integrations.transformers import AlignedTrainer

from .. import needs

pytestmark = needs.GPU


def test_recorded_steps_equal_those_as_written(
    make_model: Callable[..., Any],
    make_examples: Callable[..., Any],
    arguments: Callable[..., Any],
) -> None:
    def trained(recorded: bool) -> Any:
        trainer = AlignedTrainer(
            model=make_model("tokens"),
            args=arguments(use_cpu=False, bf16=True, max_steps=12, learning_rate=1e-3),
            train_dataset=make_examples("tokens", 90),
            tasks=["de", "fr", "sw"],
            recorded=recorded,
        )
        trainer.train()
        return trainer

    start = torch.cat([p.detach().flatten() for p in make_model("tokens").parameters()])
    replayed, written = trained(True), trained(False)
    (step,) = replayed.graphed_step.graphs.values()
    assert step.graph.works
    assert step.graph.is_replayed
    assert replayed.alignment.tasks == written.alignment.tasks
    one, other = (
        torch.cat([p.detach().flatten() for p in t.model.parameters()]).cpu() - start
        for t in (replayed, written)
    )
    assert (one - other).norm() < 0.05 * other.norm()  # bf16, and additions in any order
