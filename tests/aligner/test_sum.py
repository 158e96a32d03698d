"""`Sum()` is plain training; `.grad` behaves as torch's."""

import pytest
import torch
from torch import nn

from gradvac import Aligner, Sum

from .problems import ENGINES, Batch, Translator, draw_batch

TASKS = ["fr", "hi", "tr"]


def batch_of(seed: int) -> Batch:
    return draw_batch(torch.Generator().manual_seed(seed), TASKS)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(model: nn.Module, *batches: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in batches:
        model(batch.source, batch.words).sum().backward()
    found = gradients(model)
    model.zero_grad()
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("granularity", ["whole_model", "enc_dec", "all_layer", "all_matrix"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str
)
def test_equals_plain_backward(
    engine: str, granularity: str, dtype: torch.dtype, tolerance: float
) -> None:
    model, batch = Translator().to(dtype), batch_of(0)
    expected = plain(model, batch)
    aligner = Aligner(model, TASKS, Sum(), granularity, engine)
    alignment = aligner.backward(model(batch.source, batch.words), batch.tasks)
    torch.testing.assert_close(gradients(model), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(alignment.weights, torch.ones_like(alignment.weights))


@pytest.mark.parametrize("engine", ENGINES)
def test_tasks_by_name_position_or_tensor(engine: str) -> None:
    model, batch = Translator(), batch_of(0)
    aligner = Aligner(model, TASKS, Sum(weights={"hi": 0.25}), engine=engine)
    positions = [TASKS.index(task) for task in batch.tasks]
    found = []
    for tasks in (batch.tasks, tuple(positions), torch.tensor(positions, dtype=torch.int32)):
        model.zero_grad()
        aligner.backward(model(batch.source, batch.words), tasks)
        found.append(gradients(model))
    weights = torch.tensor([0.25 if task == "hi" else 1.0 for task in batch.tasks])
    model.zero_grad()
    (model(batch.source, batch.words) * weights).sum().backward()
    for one in found:
        torch.testing.assert_close(one, gradients(model), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_grad_is_accumulated_into(engine: str) -> None:
    model = Translator()
    expected = plain(model, batch_of(0), batch_of(1))
    aligner = Aligner(model, TASKS, Sum(), engine=engine)
    for seed in (0, 1):
        batch = batch_of(seed)
        aligner.backward(model(batch.source, batch.words), batch.tasks)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-12, atol=1e-12)


def test_a_mapping_of_scalars() -> None:
    model, batch = Translator(), batch_of(0)
    expected = plain(model, batch)
    aligner = Aligner(model, TASKS, Sum(), engine="per_task")
    losses = {}
    for task in reversed(TASKS):
        own = batch.of_task(task)
        losses[task] = model(own.source, own.words).sum()
    losses["hi"] = losses["hi"].reshape(1)  # what reduction leaves in some libraries
    aligner.backward(losses)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_afterwards(engine: str) -> None:
    model, batch = Translator(), batch_of(0)
    aligner = Aligner(model, TASKS, engine=engine)
    aligner.backward(model(batch.source, batch.words), batch.tasks)
    unclipped = gradients(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    assert norm > 0.5
    clipped = {name: gradient * 0.5 / norm for name, gradient in unclipped.items()}
    torch.testing.assert_close(gradients(model), clipped, rtol=1e-5, atol=0)
    torch.optim.Adam(model.parameters()).step()


@pytest.mark.parametrize("engine", ENGINES)
def test_detach_leaves_plain_training(engine: str) -> None:
    model, batch = Translator(), batch_of(0)
    expected, before = plain(model, batch), list(model.state_dict())
    aligner = Aligner(model, TASKS, engine=engine)
    aligner.backward(model(batch.source, batch.words), batch.tasks)
    aligner.detach()
    assert list(model.state_dict()) == before
    found = plain(model, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
