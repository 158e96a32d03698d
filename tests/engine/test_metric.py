"""Task gradients that are compared after Adam's preconditioning."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradvac import AdamMetric, Aligner, GradVac

TASKS = ["a", "b", "c"]
ROWS = [0, 1, 2, 0, 1, 2, 2, 0]


class Tagger(nn.Module):
    """A table of which a batch looks up few rows, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 4)
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.outer(self.inner(self.table(tokens).mean(1)).tanh())
        return hidden.squeeze(1)


def make(steps: int) -> tuple[Tagger, torch.optim.AdamW]:
    """A model and its optimizer after some plain steps."""
    torch.manual_seed(1)
    model = Tagger().double()
    weights, vectors = (
        [p for p in model.parameters() if (p.dim() > 1) == x] for x in (True, False)
    )
    groups = [{"params": weights, "betas": (0.9, 0.95)}, {"params": vectors, "eps": 1e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(steps):
        losses(model).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def losses(model: nn.Module) -> Tensor:
    tokens = torch.randint(100, (len(ROWS), 3))
    result: Tensor = (model(tokens) - 1).square()
    return result


def task_gradients(model: Tagger, values: Tensor) -> dict[str, Tensor]:
    """Parameter -> task gradients, from a backward for each task."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    of_task = [values[torch.tensor(ROWS) == task].sum() for task in range(len(TASKS))]
    by_task = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in of_task]
    return {name: torch.stack(own) for name, *own in zip(names, *by_task, strict=True)}


def expected(model: Tagger, optimizer: torch.optim.AdamW, values: Tensor) -> dict[str, Tensor]:
    """Parameter -> task gradients divided as an Adam that takes the plain sum divides them."""
    by_task = task_gradients(model, values)
    stepped, its_optimizer = copy.deepcopy((model, optimizer))
    for name, parameter in stepped.named_parameters():
        parameter.grad = by_task[name].sum(0)
    its_optimizer.step()
    group_of = {p: group for group in its_optimizer.param_groups for p in group["params"]}
    found = {}
    for name, parameter in stepped.named_parameters():
        group, state = group_of[parameter], its_optimizer.state[parameter]
        moment = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
        found[name] = by_task[name].div(moment.sqrt() + group["eps"]).flatten(1)
    return found


@pytest.mark.parametrize("engine", ["one_backward", "per_task"])
@pytest.mark.parametrize("granularity", ["whole_model", "all_matrix"])
@pytest.mark.parametrize("steps", [0, 3])
def test_grams_are_those_of_preconditioned_gradients(
    engine: str, granularity: str, steps: int
) -> None:
    model, optimizer = make(steps)
    metric = AdamMetric(optimizer)
    aligner = Aligner(model, TASKS, GradVac(0.5), granularity, engine, metric=metric)  # type: ignore[arg-type]
    values = losses(model)
    scaled = expected(model, optimizer, values)
    plain = task_gradients(model, values)
    alignment = aligner.backward(values, torch.tensor(ROWS))
    for gram, weights, names in zip(
        alignment.gram, alignment.weights, aligner.components.values(), strict=True
    ):
        joined = torch.cat([scaled[name] for name in names], 1)
        torch.testing.assert_close(gram, joined @ joined.T, rtol=1e-10, atol=1e-12)
        for name in names:
            update = torch.einsum("t,t...->...", weights.to(plain[name].dtype), plain[name])
            torch.testing.assert_close(model.get_parameter(name).grad, update)


def test_micro_batches_are_measured_together() -> None:
    """Two halves of a batch that are accumulated, and the whole batch."""
    model, optimizer = make(2)
    rows, tokens = torch.tensor(ROWS), torch.randint(100, (len(ROWS), 3))
    grams = []
    for size in (8, 4):
        aligner = Aligner(model, TASKS, "sum", metric=AdamMetric(optimizer))
        for start in range(0, 8, size):
            end = start + size
            done = aligner.backward(
                model(tokens[start:end]).square(), rows[start:end], accumulate=end < 8
            )
        assert done is not None
        grams.append(done.gram)
    torch.testing.assert_close(*grams)


def test_moments_that_were_loaded_count() -> None:
    """Loading replaces the groups and the state of an optimizer."""
    model, optimizer = make(3)
    other = torch.optim.AdamW(
        [{"params": group["params"]} for group in optimizer.param_groups], lr=1.0
    )
    metric, stack = AdamMetric(other), torch.randn(3, model.outer.weight.numel()).double()
    other.load_state_dict(optimizer.state_dict())
    weight = model.outer.weight
    assert torch.equal(metric(weight, stack), AdamMetric(optimizer)(weight, stack))


def test_what_cannot_be_measured_is_refused() -> None:
    model, optimizer = make(0)
    with pytest.raises(ValueError, match="got SGD"):
        AdamMetric(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="amsgrad"):
        AdamMetric(torch.optim.AdamW(model.parameters(), amsgrad=True))
    with pytest.raises(ValueError, match=r"metric .*recompute=True"):
        Aligner(model, TASKS, recompute=True, metric=AdamMetric(optimizer))
    some = AdamMetric(torch.optim.AdamW(model.outer.parameters()))
    with pytest.raises(ValueError, match="lacks a parameter"):
        Aligner(model, TASKS, engine="per_task", metric=some).backward(
            losses(model), torch.tensor(ROWS)
        )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"metric .*several processes"):
            Aligner(model, TASKS, metric=AdamMetric(optimizer), process_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
