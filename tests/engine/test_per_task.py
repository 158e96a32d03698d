"""The per_task engine: every way losses can come, every kind of parameter."""

import gc
import weakref
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, GradVac, Sum
from gradvac.engine import AccumulatedGradients, LocalEngine, Losses, read_losses, split

TASKS = ["fr", "hi", "tr"]


class Trunk(nn.Module):
    """A shared trunk and one head per task, the last shared by hi and tr."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.french, self.others = nn.Linear(3, 1), nn.Linear(3, 1)
        self.unused = nn.Linear(3, 1)
        self.double()

    def forward(self, inputs: Tensor, task: str) -> Tensor:
        head = self.french if task == "fr" else self.others
        return head(self.trunk(inputs))[:, 0]


@pytest.fixture
def model() -> Trunk:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Trunk()


def inputs_of(task: str) -> Tensor:
    generator = torch.Generator().manual_seed(TASKS.index(task))
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def loss_of(model: Trunk, task: str) -> Tensor:
    return (model(inputs_of(task), task) - TASKS.index(task)).square().mean()


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def stored(
    model: nn.Module, batches: Sequence[Losses], present: Sequence[int], **options: object
) -> tuple[dict[str, Tensor], list[str]]:
    """Gram matrices by component, and the parameters that received `.grad`."""
    components = split(model, "all_layer")
    engines = LocalEngine("per_task", model, components, TASKS, **options)
    seen: dict[str, Tensor] = {}

    def weigh(chosen: Sequence[int], gram: Tensor) -> Tensor:
        names = list(components)
        seen.update({names[k]: one for k, one in zip(chosen, gram, strict=True)})
        return torch.ones(len(chosen), len(present), dtype=gram.dtype)

    for batch in batches[:-1]:
        engines.accumulate(batch)
    engines.step(batches[-1], present, lambda: weigh)
    return seen, list(grads(model))


def test_gram_matrices_of_separate_forward_passes(model: Trunk) -> None:
    losses = {task: loss_of(model, task) for task in TASKS}
    gram, _ = stored(model, [read_losses(losses, None, TASKS)], [0, 1, 2])
    names = dict(model.named_parameters())
    for component, own in split(model, "all_layer").items():
        rows = []
        for task in TASKS:
            values = torch.autograd.grad(
                loss_of(model, task), [names[p] for p in own], allow_unused=True
            )
            rows.append(
                torch.cat(
                    [
                        torch.zeros_like(names[p]).flatten() if g is None else g.flatten()
                        for p, g in zip(own, values, strict=True)
                    ]
                )
            )
        expected = torch.stack(rows) @ torch.stack(rows).T
        found = gram.get(component, torch.zeros_like(expected))  # what no loss reaches has none
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_heads_of_some_tasks(model: Trunk) -> None:
    """A head's only task passes unaltered, whatever the target; absent ones have norm 0."""
    aligner = Aligner(model, TASKS, GradVac(target=0.99), engine="per_task")
    alignment = aligner.backward({task: loss_of(model, task) for task in TASKS})
    norms = dict(zip(alignment.components, alignment.norms.tolist(), strict=True))
    assert [norm > 0 for norm in norms["french"]] == [True, False, False]
    assert [norm > 0 for norm in norms["others"]] == [False, True, True]
    expected = torch.autograd.grad(loss_of(model, "fr"), model.french.weight)[0]
    torch.testing.assert_close(model.french.weight.grad, expected)
    active = alignment.active[alignment.components.index("others")]
    assert active.tolist() == [[False] * 3, [False, False, True], [False, True, False]]
    target = GradVac(beta=0.5)
    moving = Aligner(model, TASKS, target, engine="per_task")
    moving.backward({task: loss_of(model, task) for task in TASKS})
    learned = moving.state_dict()["target"][list(moving.components).index("french")]
    assert not learned.any()  # inert pairs teach nothing


def test_unused_parameters_keep_no_gradient(model: Trunk) -> None:
    aligner = Aligner(model, TASKS, engine="per_task")
    alignment = aligner.backward({task: loss_of(model, task) for task in TASKS})
    assert model.unused.weight.grad is None
    assert model.unused.bias.grad is None
    assert not alignment.norms[alignment.components.index("unused")].any()

    model.zero_grad()
    aligner.backward({"fr": loss_of(model, "fr")})
    assert model.others.weight.grad is None
    assert model.french.weight.grad is not None


def test_an_unused_parameter_keeps_the_gradient_it_has(model: Trunk) -> None:
    model.unused.weight.grad = torch.full_like(model.unused.weight, 3.0)
    Aligner(model, TASKS, engine="per_task").backward({"fr": loss_of(model, "fr")})
    assert (model.unused.weight.grad == 3.0).all()


def test_frozen_parameters_are_left_alone(model: Trunk) -> None:
    model.trunk[0].requires_grad_(False)
    aligner = Aligner(model, TASKS, Sum(), engine="per_task")
    assert "trunk.0" not in aligner.components
    aligner.backward({task: loss_of(model, task) for task in TASKS})
    assert model.trunk[0].weight.grad is None
    found = grads(model)
    model.zero_grad()
    sum(loss_of(model, task) for task in TASKS).backward()
    torch.testing.assert_close(found, grads(model), rtol=1e-12, atol=1e-14)


def test_a_parameter_unfrozen_later_is_refused_by_name(model: Trunk) -> None:
    model.french.bias.requires_grad_(False)
    aligner = Aligner(model, TASKS, Sum(), engine="per_task")
    model.french.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"french\.bias .* replaced"):
        aligner.backward({task: loss_of(model, task) for task in TASKS})


def test_a_parameter_frozen_later_gets_no_gradient(model: Trunk) -> None:
    aligner = Aligner(model, TASKS, Sum(), engine="per_task")
    model.french.requires_grad_(False)
    aligner.backward({task: loss_of(model, task) for task in TASKS})
    assert model.french.weight.grad is None
    assert model.trunk[0].weight.grad is not None


class Remember(torch.autograd.Function):
    """The identity, saving a tensor that only the graph holds."""

    @staticmethod
    def forward(ctx, value: Tensor, log: list[weakref.ref[Tensor]]) -> Tensor:
        saved = torch.ones(3)
        log.append(weakref.ref(saved))
        ctx.save_for_backward(saved)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors[0].sum() == 3
        return gradient, None


def test_separate_graphs_are_freed_as_soon_as_their_task_is_done(model: Trunk) -> None:
    log: list[weakref.ref[Tensor]] = []
    alive_at_backward: dict[str, list[bool]] = {}
    losses = {}
    for task in TASKS:
        loss = Remember.apply(loss_of(model, task), log)

        def look(gradient: Tensor, task: str = task) -> None:
            gc.collect()
            alive_at_backward[task] = [saved() is not None for saved in log]

        loss.register_hook(look)
        losses[task] = loss
    Aligner(model, TASKS, engine="per_task").backward(losses)
    assert list(alive_at_backward.values()) == [
        [True, True, True],
        [False, True, True],
        [False, False, True],
    ]
    with pytest.raises(RuntimeError, match="second time"):
        losses["tr"].backward()


def test_a_shared_graph_is_kept_until_its_last_task(model: Trunk) -> None:
    def losses() -> dict[str, Tensor]:
        inputs = torch.cat([inputs_of(task) for task in TASKS[:2]])
        features = model.trunk(inputs)  # one forward for fr and hi, another for tr
        return {
            "fr": model.french(features[:6]).square().mean(),
            "hi": model.others(features[6:]).square().mean(),
            "tr": loss_of(model, "tr"),
        }

    aligner = Aligner(model, TASKS, Sum(), engine="per_task")
    given = losses()
    aligner.backward(given)
    found = grads(model)
    model.zero_grad()
    sum(losses().values()).backward()
    torch.testing.assert_close(found, grads(model), rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="second time"):
        given["hi"].backward()


def test_losses_that_are_parts_of_one_tensor(model: Trunk) -> None:
    """Indexing gives every task a node of its own above a shared graph."""
    outputs = model(torch.cat([inputs_of(task) for task in TASKS]), "hi").square()
    losses = {task: outputs[6 * i : 6 * i + 6].sum() for i, task in enumerate(TASKS)}
    Aligner(model, TASKS, Sum(), engine="per_task").backward(losses)
    found = grads(model)
    model.zero_grad()
    model(torch.cat([inputs_of(task) for task in TASKS]), "hi").square().sum().backward()
    torch.testing.assert_close(found, grads(model), rtol=1e-12, atol=1e-14)


def test_rows_of_a_mixed_batch(model: Trunk) -> None:
    """Rows in any order; the graph is freed at the end."""
    inputs = torch.cat([inputs_of(task) for task in TASKS])
    tasks = [TASKS[(5 * row) % 3] for row in range(len(inputs))]
    losses = model(inputs, "hi").square()
    gram, _ = stored(model, [read_losses(losses, tasks, TASKS)], [0, 1, 2])
    for i, task in enumerate(TASKS):
        own = torch.tensor([row for row, name in enumerate(tasks) if name == task])
        loss = model(inputs[own], "hi").square().sum()
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(model.others.parameters()))]
        )
        torch.testing.assert_close(gram["others"][i, i], gradient.square().sum())
    with pytest.raises(RuntimeError, match="second time"):
        losses.sum().backward()


def test_different_tasks_in_every_micro_batch(model: Trunk) -> None:
    whole = {task: loss_of(model, task) for task in TASKS}
    expected, names = stored(model, [read_losses(whole, None, TASKS)], [0, 1, 2])
    gradients = grads(model)
    model.zero_grad()
    parts = [
        {"fr": 0.25 * loss_of(model, "fr"), "hi": loss_of(model, "hi")},
        {"tr": loss_of(model, "tr")},
        {"fr": 0.75 * loss_of(model, "fr")},
    ]
    batches = [read_losses(part, None, TASKS) for part in parts]
    found, also = stored(model, batches, [0, 1, 2])
    assert names == also
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(grads(model), gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_storage_dtype(model: Trunk, dtype: torch.dtype) -> None:
    """Stored coarsely, summed finely: what differs is the rounding of each task gradient."""
    rule = Sum(weights={"hi": 0.5})
    aligner = Aligner(model, TASKS, rule, engine="per_task", storage_dtype=dtype)
    aligner.backward({task: loss_of(model, task) for task in TASKS})
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        expected = torch.zeros_like(parameter)
        for task in TASKS:
            loss = loss_of(model, task)
            gradient = torch.autograd.grad(loss, parameter, allow_unused=True)[0]
            if gradient is not None:
                expected += (0.5 if task == "hi" else 1.0) * gradient.to(dtype).to(torch.float64)
        assert parameter.grad.dtype == torch.float64, name
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=1e-7)


def test_offload_changes_nothing(model: Trunk) -> None:
    found = []
    for offload in (False, True):
        model.zero_grad()
        aligner = Aligner(model, TASKS, GradVac(target=0.5), engine="per_task", offload=offload)
        losses = {task: loss_of(model, task) for task in TASKS}
        aligner.backward({"fr": losses["fr"]}, accumulate=True)
        aligner.backward({"hi": losses["hi"], "tr": losses["tr"]})
        found.append(grads(model))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


def test_task_gradients_are_freed(model: Trunk, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Tensor]] = []
    add = AccumulatedGradients.add

    def spy(stored: AccumulatedGradients, leaf: Tensor, by_task: Mapping[int, Tensor]) -> None:
        if leaf is model.trunk[0].weight:
            seen.extend(weakref.ref(gradient) for gradient in by_task.values())
        add(stored, leaf, by_task)

    monkeypatch.setattr(AccumulatedGradients, "add", spy)
    aligner = Aligner(model, TASKS, engine="per_task")
    aligner.backward({task: loss_of(model, task) for task in TASKS[:2]}, accumulate=True)
    gc.collect()
    assert [gradient() is not None for gradient in seen] == [True, True]
    alignment = aligner.backward({"tr": loss_of(model, "tr")})
    gc.collect()
    assert [gradient() is not None for gradient in seen] == [False, False, False]
    assert alignment.tasks == tuple(TASKS)


def test_sparse_embedding_gradients() -> None:
    embedding = nn.Embedding(7, 3, sparse=True).double()
    tokens = torch.tensor([[1, 2], [2, 5], [6, 6]])
    aligner = Aligner(embedding, TASKS, Sum(), engine="per_task")
    losses = embedding(tokens).square().sum((1, 2))
    aligner.backward(losses, TASKS)
    expected = torch.zeros_like(embedding.weight)
    expected.index_add_(0, tokens.flatten(), 2 * embedding.weight.detach()[tokens.flatten()])
    torch.testing.assert_close(embedding.weight.grad.to_dense(), expected)


def test_row_coupling_layers_work() -> None:
    """One backward per task is right for any model, batch norm in training mode included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    inputs, tasks = torch.randn(9, 3, dtype=torch.float64), [0, 1, 2] * 3
    aligner = Aligner(model, TASKS, Sum(), engine="per_task")
    alignment = aligner.backward(model(inputs)[:, 0].square(), tasks)
    weight = model[2].weight
    for i in range(3):
        loss = model(inputs)[:, 0].square()[i::3].sum()
        norm = torch.autograd.grad(loss, [weight, model[2].bias])
        expected = torch.cat([g.flatten() for g in norm]).norm()
        torch.testing.assert_close(alignment.norms[2, i], expected)
