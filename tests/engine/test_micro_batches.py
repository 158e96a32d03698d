"""Gradient accumulation and loss scaling with one_backward."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, GradVac

from .parity import (
    TASKS,
    UNSORTED,
    Twins,
    assert_same_alignment,
    assert_same_gradients,
    attach,
    gradients_of,
    made,
)
from .zoo import ZOO
from .zoo._case import B, Block, D, S, distance

# Rows of the batch by micro-batch; tasks of the rows are [2, 0, 1, 0, 2, 2].
LAYOUTS = {"mixed": [[0, 1, 2], [3, 4, 5]], "other tasks": [[0, 4], [1, 2, 3], [5]]}
MODELS = [
    "tied_softmax",
    "heads_of_tasks",
    "heads_on_the_rows_of_their_task",
    "called_twice",
    "conv1d",
    "conv2d",
    "embedding_bag_with_offsets",
    "transformer",
    "lstm_with_states",
    "checkpointed_not_reentrant",
    "bert",
]


def rule() -> GradVac:
    return GradVac(beta=0.3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_accumulation_equals_per_task(name: str, layout: str) -> None:
    twins = Twins(made(name), rule)
    case, tasks = twins.case, torch.tensor(UNSORTED)
    for _ in range(2):
        results = []
        for model, aligner in ((twins.reference, twins.per_task), (twins.model, twins.aligner)):
            *earlier, last = LAYOUTS[layout]
            for rows in earlier:
                inputs = [x[rows] for x in case.inputs]
                before = gradients_of(model)
                nothing = aligner.backward(
                    case.losses(model, tasks[rows], *inputs), tasks[rows], accumulate=True
                )
                assert nothing is None
                torch.testing.assert_close(gradients_of(model), before, rtol=0, atol=0)
            inputs = [x[last] for x in case.inputs]
            results.append(aligner.backward(case.losses(model, tasks[last], *inputs), tasks[last]))
        assert_same_alignment(results[1], results[0], 1e-9)
        assert_same_gradients(twins.model, twins.reference, 1e-9)


@pytest.mark.parametrize(
    "options", [{}, {"table_bytes": 1}, {"stream_bytes": 1}], ids=["default", "slices", "streaming"]
)
@pytest.mark.parametrize("name", ["tied_softmax", "transformer_encoder", "conv2d", "nested"])
def test_accumulation_equals_one_large_batch(name: str, options: dict[str, Any]) -> None:
    case = made(name)
    whole, parts = copy.deepcopy(case.model), copy.deepcopy(case.model)
    tasks = torch.tensor(UNSORTED)

    def losses(model: nn.Module, rows: list[int]) -> Tensor:
        found: Tensor = model(*(x[rows] for x in case.inputs)).square().flatten(1).mean(1)
        return found

    expected = attach(whole, rule()).backward(losses(whole, list(range(B))), tasks)
    aligner = attach(parts, rule(), **options)
    aligner.backward(losses(parts, [0, 4]), tasks[[0, 4]], accumulate=True)
    aligner.backward(losses(parts, [5]), tasks[[5]], accumulate=True)
    found = aligner.backward(losses(parts, [1, 2, 3]), tasks[[1, 2, 3]])
    assert_same_alignment(found, expected, 1e-9)
    assert_same_gradients(parts, whole, 1e-9)


def test_plain_step_after_an_accumulated_one() -> None:
    """What was stored for all tasks is gone: the next step has its own tasks alone."""
    twins = Twins(made("tied_softmax"), rule)
    tasks = torch.tensor(UNSORTED)
    for model, aligner in ((twins.reference, twins.per_task), (twins.model, twins.aligner)):
        losses = twins.case.losses(model, tasks, *twins.case.inputs)
        aligner.backward(losses, tasks, accumulate=True)
        aligner.backward(twins.case.losses(model, tasks, *twins.case.inputs), tasks)
    assert_same_gradients(twins.model, twins.reference, 1e-9)
    twins.step([1, 1, 2, 2, 1, 2])


def test_no_accumulation_without_stored_gradients() -> None:
    model = Block()
    aligner = attach(model, granularity="whole_model", recompute=True)
    with pytest.raises(ValueError, match=r"accumulate: recompute=True.*per_task"):
        aligner.backward(distance(model(torch.randn(B, D))), UNSORTED, accumulate=True)


class Half(nn.Module):
    """Passes through float16, where large gradients become infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.half().float()


@pytest.mark.parametrize(
    "options", [{}, {"granularity": "whole_model", "recompute": True}], ids=["stored", "recomputed"]
)
def test_overflow_skips_the_step(options: dict[str, Any]) -> None:
    model = nn.Sequential(Block(), Half(), nn.Linear(D, 2))
    reference = copy.deepcopy(model)
    granularity = options.get("granularity", "all_layer")
    pairs: list[tuple[nn.Module, Aligner]] = [
        (reference, Aligner(reference, TASKS, rule(), granularity, "per_task")),
        (model, attach(model, rule(), **options)),
    ]
    x = torch.randn(B, S, D)
    skipped = []
    for each, aligner in pairs:
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
        for _ in range(12):
            optimizer.zero_grad()
            before = copy.deepcopy(each.state_dict()), aligner.state_dict()["step"]
            scale = scaler.get_scale()
            aligner.backward(scaler.scale(distance(each(x))), UNSORTED)
            scaler.step(optimizer)
            scaler.update()
            was_skipped = scaler.get_scale() < scale
            skipped.append(was_skipped)
            same = all(torch.equal(v, before[0][k]) for k, v in each.state_dict().items())
            assert same == was_skipped
            assert (aligner.state_dict()["step"] == before[1]) == was_skipped
    assert skipped[:12] == skipped[12:]
    assert True in skipped
    assert False in skipped
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_micro_batches_of_single_tasks_over_the_zoo() -> None:
    """One task at a time, as a sampler may draw them."""
    for name in ("gpt2", "packed", "fallback_shares_with_fast_path"):
        assert name in ZOO
        case = made(name)
        own = replace(case, inputs=tuple(x[:4] for x in case.inputs))
        twins = Twins(own, rule)
        for task in (0, 2):
            twins.step([task] * 4)
        twins.step([0, 1, 2, 0])
