"""`accumulate=True`: micro-batches that act as one batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradvac import MGDA, Aligner, GradNorm, GradVac, Sum
from gradvac.rules import Rule

from .problems import ENGINES, Batch, Translator, descend, draw_batch

TASKS = ["tr", "fr", "hi", "cs"]
RULES: dict[str, Callable[[], Rule]] = {
    "gradvac": lambda: GradVac(beta=0.2),
    "mgda": lambda: MGDA(normalize="loss"),
    "gradnorm": lambda: GradNorm(),
    "sum": lambda: Sum(),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("granularity", ["whole_model", "all_layer"])
@pytest.mark.parametrize("make", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("parts", ["mixed", "by task"])
def test_equals_one_big_batch(
    engine: str, granularity: str, make: Callable[[], Rule], parts: str
) -> None:
    big, small = Translator(), Translator()
    of_big = Aligner(big, TASKS, make(), granularity, engine)
    of_small = Aligner(small, TASKS, make(), granularity, engine)
    generator = torch.Generator().manual_seed(0)
    for count in (4, 2, 3, 4):  # some tasks are absent
        batch = draw_batch(generator, TASKS[:count])
        expected = of_big.backward(big(batch.source, batch.words), batch.tasks)

        if parts == "mixed":
            pieces = [batch.of([0, 1, 2, 3, 4]), batch.of([5]), batch.of(range(6, 12))]
        else:
            pieces = [batch.of_task(task) for task in TASKS[:count]]
        for piece in pieces[:-1]:
            losses = small(piece.source, piece.words)
            assert of_small.backward(losses, piece.tasks, accumulate=True) is None
            assert all(p.grad is None for p in small.parameters())
        losses = small(pieces[-1].source, pieces[-1].words)
        found = of_small.backward(losses, pieces[-1].tasks)

        assert found.tasks == expected.tasks
        torch.testing.assert_close(found.gram, expected.gram, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-6, atol=1e-8)
        for one, other in zip(small.parameters(), big.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-8)
        descend(big, lr=0.02)
        descend(small, lr=0.02)


@pytest.mark.parametrize("engine", ENGINES)
def test_state_has_no_room_for_half_a_step(engine: str) -> None:
    model = Translator()
    aligner = Aligner(model, TASKS, engine=engine)
    batch = draw_batch(torch.Generator().manual_seed(0), TASKS)
    aligner.backward(model(batch.source, batch.words), batch.tasks, accumulate=True)
    with pytest.raises(ValueError, match="state_dict: "):
        aligner.state_dict()
    aligner.backward(model(batch.source, batch.words), batch.tasks)
    aligner.state_dict()


def test_a_call_with_wrong_arguments_changes_nothing() -> None:
    model = Translator()
    aligner = Aligner(model, TASKS, Sum())
    batch = draw_batch(torch.Generator().manual_seed(0), TASKS)
    aligner.backward(model(batch.source, batch.words), batch.tasks, accumulate=True)
    with pytest.raises(ValueError, match="tasks_of_rows"):
        aligner.backward(model(batch.source, batch.words), batch.tasks[:-1])
    aligner.backward(model(batch.source, batch.words), batch.tasks)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    (2 * model(batch.source, batch.words)).sum().backward()
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_separate_forward_passes_per_task() -> None:
    big, small = Translator(), Translator()
    of_big, of_small = (Aligner(m, TASKS, engine="per_task") for m in (big, small))
    batch = draw_batch(torch.Generator().manual_seed(0), TASKS)
    of_big.backward(big(batch.source, batch.words), batch.tasks)
    for position, task in enumerate(TASKS):
        own = batch.of_task(task)
        loss = small(own.source, own.words).sum()
        of_small.backward({task: loss}, accumulate=position < len(TASKS) - 1)
    for one, other in zip(small.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("first", ["rows", "mapping"])
def test_micro_batches_of_one_step_in_two_forms(first: str) -> None:
    big, small = Translator(), Translator()
    of_big, of_small = (Aligner(m, TASKS, GradVac(beta=0.2), engine="auto") for m in (big, small))
    batch = draw_batch(torch.Generator().manual_seed(0), TASKS)
    of_big.backward(big(batch.source, batch.words), batch.tasks)
    half, other = batch.of([0, 1, 2, 3, 4]), batch.of(range(5, 12))

    def losses(piece: Batch, form: str) -> tuple[Any, Any]:
        rows = small(piece.source, piece.words)
        if form == "rows":
            return rows, piece.tasks
        found = {task: [n for n, own in enumerate(piece.tasks) if own == task] for task in TASKS}
        return {task: rows[own].sum() for task, own in found.items() if own}, None

    of_small.backward(*losses(half, first), accumulate=True)
    of_small.backward(*losses(other, "mapping" if first == "rows" else "rows"))
    for one, other_one in zip(small.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other_one.grad, rtol=1e-9, atol=1e-12)
