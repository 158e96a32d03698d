"""Tagging on a GPU: steps that are replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradvac.lab.recipes.tagging import TaggingConfig, prepare_sentences
from gradvac.lab.recipes.tagging.recipe import TaggingWorkload
from gradvac.lab.recipes.tagging.tagger import TagBatch
from gradvac.lab.training import seed_everything
from gradvac.lab.training.job import Job
from gradvac.lab.training.state import RunState
from gradvac.lab.training.step import EagerStep, GraphStep

from .. import needs
from ..nmt.test_recorded_steps import follow


def make_state(config: TaggingConfig) -> RunState[TagBatch]:
    seed_everything(0)
    recipe = TaggingWorkload(config, prepare_sentences(config))
    return RunState(recipe, config, Job())


def test_the_comparison_holds_on_this_machine(settings: Callable[..., TaggingConfig]) -> None:
    """Steps as they are written against themselves, in batches of one size."""
    config = settings(batch={"rows": 24, "epochs": 0.0, "fixed": True})
    apart = follow(config, lambda state: EagerStep(config, state), 3, 1e-4, make_state)
    assert min(apart) > 1e-3


@needs.GPU
@pytest.mark.parametrize("rule", ["sum", "gradvac", "pcgrad", "gradnorm", "mgda"])
def test_recorded_steps_equal_those_as_written(
    settings: Callable[..., TaggingConfig], rule: str
) -> None:
    config = settings(
        batch={"rows": 24, "epochs": 0.0, "fixed": True},
        align={"rule": rule},
        train=settings().train.model_dump() | {"device": "cuda", "precision": "bf16"},
    )
    steps = []

    def record(state: RunState[TagBatch]) -> GraphStep[TagBatch]:
        steps.append(GraphStep(EagerStep(config, state), state.device))
        return steps[0]

    limit = 0.05 if rule == "mgda" else 0.02
    apart = follow(config, record, 12, limit, make_state)
    assert min(apart) > 5 * limit
    assert steps[0].works
