"""Plain junctions: they wait, are built by shape, and come to the same as task by task."""

# B rows, S tokens, D width

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradvac import Aligner, GradVac, Sum
from gradvac.engine import builder, plain_junctions, task_gradients

from .parity import ONE_ABSENT, SORTED, TASKS, UNSORTED, Twins, gradients_of
from .zoo._case import B, Case, D, Model, S, output


class Scale(nn.Module):
    """Beside a tensor that is broadcast, if it is narrow."""

    def __init__(self, narrow: bool = False) -> None:
        super().__init__()
        self.weight, self.narrow = nn.Parameter(torch.randn(D)), narrow

    def forward(self, x: Tensor) -> Tensor:
        if self.narrow:
            return x + self.weight * x.mean(-1, keepdim=True).tanh()
        return self.weight * x


class Expanded(nn.Module):
    """A shift that is expanded to the rows it serves, as by the compiler's backend."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.expand(x.shape)


class Columns(nn.Module):
    """A weight as GPT-2 has it, which is not transposed; `alpha` is no part of the signature."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, D) / 3), nn.Parameter(torch.randn(D))
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, D), self.weight, alpha=self.alpha)
        return flat.view(x.shape)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def twice(make: Callable[[], nn.Module]) -> nn.Module:
    """Two alike, so that they are built together, behind something that is alone."""
    return nn.Sequential(nn.Linear(D, D), make(), nn.Tanh(), make(), nn.Linear(D, 3))


# What there is besides the first and the last layer, and how many junctions are plain.
LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "linear": (lambda: nn.Linear(D, D), 4),
    "without shift": (lambda: nn.Linear(D, D, bias=False), 4),
    "columns": (Columns, 4),
    "factor": (lambda: Columns(alpha=2.0), 2),
    "layer norm": (lambda: nn.LayerNorm(D), 4),
    "layer norm without shift": (lambda: nn.LayerNorm(D, bias=False), 4),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((S, D)), 2),
    "rms norm": (lambda: nn.RMSNorm(D), 4),
    "scale": (Scale, 4),
    "scale of a narrow tensor": (lambda: Scale(narrow=True), 4),
    "expanded shift": (Expanded, 4),
    "checkpoint": (lambda: Checkpointed(nn.Linear(D, D)), 4),
}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many junctions were built each time; after the pass, if nothing streams."""
    found: list[int] = []
    build = plain_junctions.build_together

    def counted(groups: Any) -> Any:
        if groups:
            found.append(sum(len(group.junctions) for group in groups))
        return build(groups)

    monkeypatch.setattr(builder, "build_together", counted)
    return found


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_equals_per_task(
    layer: str, joined: bool, held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not joined:
        monkeypatch.setattr(plain_junctions, "_JOINED_BYTES", ((0, 0), (0, 0)))
    make, num_plain = LAYERS[layer]
    case = Case(twice(make).double(), output, (torch.randn(B, S, D).double(),))
    twins = Twins(case, lambda: GradVac(beta=0.3))
    for tasks in (UNSORTED, SORTED, ONE_ABSENT):
        twins.step(tasks)
    assert held == [num_plain] * 3 or layer == "checkpoint"  # which is read during the pass
    assert sum(held) == 3 * num_plain


def test_layers_of_several_lengths(held: list[int]) -> None:
    """An encoder and a decoder: weights of one shape, but not as many entries."""
    parts = {name: nn.Linear(D, D) for name in ("a", "b", "c")}
    model = Model(
        lambda m, x: torch.cat([m.a(x), m.b(x[:, 1:]), m.c(x[:, 0])[:, None]], 1), **parts
    )
    twins = Twins(Case(model.double(), output, (torch.randn(B, S, D).double(),)), GradVac)
    for tasks in (UNSORTED, ONE_ABSENT):
        twins.step(tasks)
    assert held == [3, 3]


def test_a_scale_that_is_also_the_shift(held: list[int]) -> None:
    model = Model(
        lambda m, x: m.a(F.layer_norm(x, (D,), m.b, m.b)),
        a=nn.Linear(D, D),
        b=nn.Parameter(torch.randn(D)),
    )
    twins = Twins(Case(model.double(), output, (torch.randn(B, S, D).double(),)), GradVac)
    twins.step(UNSORTED)
    assert held == [1]


@pytest.mark.parametrize("lengths", [(1, 4), (4, 0, 2)])
def test_lengths_from_batch_to_batch(lengths: tuple[int, ...]) -> None:
    """Of one token, of none; a single number is broadcast or not."""
    parts = {"a": nn.Linear(D, D), "size": nn.Parameter(torch.ones(1)), "b": nn.Linear(D, D)}
    model = Model(lambda m, x: (m.size * m.a(x).mean(2))[..., None] * m.b(x), **parts).double()
    case = Case(model, lambda m, _, x: m(x).square().sum((1, 2)) + m.b(x[:, :0]).sum((1, 2)), ())
    twins = Twins(case, GradVac)
    for length in lengths:
        twins.case = replace(case, inputs=(torch.randn(B, length, D).double(),))
        twins.step(UNSORTED)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_is_used_again(layer: str, held: list[int]) -> None:
    """Its uses are built as one; also beside another, and where one has fewer entries."""
    make, _ = LAYERS[layer]
    model = Model(
        lambda m, x: m.b(torch.tanh(m.a(m.c(m.a(m.a(x)).tanh())))) + m.a(x).mean(1, keepdim=True),
        a=make(),
        b=nn.Linear(D, D),
        c=nn.Linear(D, D),
    )
    twins = Twins(Case(model.double(), output, (torch.randn(B, S, D).double(),)), GradVac)
    for tasks in (UNSORTED, SORTED, ONE_ABSENT):
        twins.step(tasks)
    assert held == [2 if layer in ("factor", "layer norm of two dimensions") else 6] * 3


@pytest.mark.parametrize(
    ("options", "num"), [({"stream_bytes": 1}, [1, 1, 1, 1]), ({"recompute": True}, [1] * 8)]
)
def test_what_streams_is_built_on_the_way(
    options: dict[str, Any], num: list[int], held: list[int]
) -> None:
    model = twice(lambda: nn.Linear(D, D)).double()
    twins = Twins(Case(model, output, (torch.randn(B, S, D).double(),)), GradVac, **options)
    twins.step(UNSORTED)
    assert held == num


def test_saved_tensors_behind_hooks(held: list[int]) -> None:
    """They are read during the pass, where whoever keeps them expects it."""
    read: list[int] = []

    def unpack(kept: Tensor) -> Tensor:
        read.append(torch._C._current_graph_task_id())
        return kept

    def losses(model: nn.Module, tasks: Tensor, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, unpack):
            return output(model, tasks, x)

    model = twice(lambda: nn.Linear(D, D)).double()
    twins = Twins(Case(model, losses, (torch.randn(B, S, D).double(),)), GradVac, check=False)
    for tasks in (UNSORTED, SORTED):
        read.clear()
        twins.step(tasks)
    assert held == [4, 4]
    assert read[0] != -1  # the first layer is the last to be read: its node does not run


def test_frozen_after_the_forward(held: list[int]) -> None:
    torch.manual_seed(0)
    model, x = twice(lambda: nn.Linear(D, D)), torch.randn(B, S, D)
    aligner = Aligner(model, TASKS, Sum(), engine="one_backward")
    for _ in range(2):
        model.zero_grad()
        losses = output(model, torch.tensor(UNSORTED), x)
        frozen = model[1].weight
        frozen.requires_grad_(False)
        aligner.backward(losses, UNSORTED)
        assert frozen.grad is None
        found = gradients_of(model)
        frozen.requires_grad_(True)
        model.zero_grad()
        output(model, torch.tensor(UNSORTED), x).sum().backward()
        for name, gradient in gradients_of(model).items():
            if name in found:
                torch.testing.assert_close(found[name], gradient)
        assert len(found) == len(gradients_of(model)) - 1
    assert held == [4, 4]


def test_a_hook_of_the_node_itself(held: list[int]) -> None:
    """It changes what the node gets, and may be new in any step; then nothing is captured."""

    def losses(model: nn.Module, tasks: Tensor, x: Tensor) -> Tensor:
        hidden = model[1](model[0](x))  # type: ignore[index]
        if len(held) > 0:
            hidden.grad_fn.register_prehook(lambda gradients: (3.0 * gradients[0],))
        return output(model[2:], tasks, hidden)  # type: ignore[index]

    model = twice(lambda: nn.Linear(D, D)).double()
    twins = Twins(Case(model, losses, (torch.randn(B, D).double(),)), GradVac, check=False)
    for tasks in (UNSORTED, SORTED):
        twins.step(tasks)
    assert held == [4, 4]


@pytest.mark.parametrize("layer", ["linear", "rms norm", "scale"])
def test_inside_autocast_as_outside(layer: str) -> None:
    """A backward computes in the precision that its forward computed in."""
    model, x = twice(LAYERS[layer][0]), torch.randn(B, S, D)
    aligner = Aligner(model, TASKS, Sum(), engine="one_backward")
    for _ in range(2):
        model.zero_grad()
        losses = F.mse_loss(model(x), x[..., :3], reduction="none").mean((1, 2))
        with torch.autocast("cpu", torch.bfloat16):
            aligner.backward(losses, UNSORTED)
        found = gradients_of(model)
        model.zero_grad()
        F.mse_loss(model(x), x[..., :3], reduction="none").mean((1, 2)).sum().backward()
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("role", ["scale", "shift"])
def test_a_slice_of_a_parameter_that_is_broadcast_in_another_batch(role: str) -> None:
    torch.manual_seed(0)
    layer, long = nn.Linear(6, 6).double(), nn.Parameter(torch.randn(6, dtype=torch.float64))
    model = nn.ParameterList([long, *layer.parameters()])
    every = [Aligner(model, TASKS, Sum(), engine=engine) for engine in ("one_backward", "per_task")]
    for size in (6, 6, 6, 1, 6, 1):
        x, found = torch.randn(9, 6, dtype=torch.float64), []
        for aligner in every:
            model.zero_grad()
            hidden = torch.tanh(layer(x))
            if role == "scale":
                hidden = hidden * long[:size]
            else:
                hidden = torch.addmm(long[:size], hidden, layer.weight)
            aligner.backward(hidden.square().mean(1), [row % len(TASKS) for row in range(9)])
            found.append([p.grad.clone() for p in model.parameters()])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_recomputed_gradients_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes are taken so that one layer's task gradients are held at a time."""
    model = nn.Sequential(*(nn.Linear(D, D) for _ in range(6))).double()
    aligner = Aligner(model, TASKS, Sum(), granularity="whole_model", recompute=True)
    alive: list[weakref.ref[Tensor]] = []
    most = [0]
    original = task_gradients.TaskGradients.add_block

    def counted(self: Any, parameters: Any, block: Tensor) -> None:
        original(self, parameters, block)
        alive.append(weakref.ref(block))
        most[0] = max(most[0], sum(one() is not None for one in alive))

    monkeypatch.setattr(task_gradients.TaskGradients, "add_block", counted)
    for _ in range(3):
        x = torch.randn(9, D, dtype=torch.float64)
        aligner.backward(model(x).square().mean(1), [row % len(TASKS) for row in range(9)])
    assert len(alive) >= 12
    assert most[0] <= 3, "a weight, its shift, and the next"


def test_operands_are_freed_as_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are shown during the pass; one that reads them before it holds them to the end."""
    monkeypatch.setattr(builder.GradientBuilder, "capture", lambda _: {})
    build, alive = plain_junctions.build_together, list[int]()

    def watched(groups: Any) -> Any:
        gradients = [weakref.ref(one) for group in groups for one in group.gradients]
        for built in build(groups):
            yield built
            alive.append(sum(one() is not None for one in gradients))

    monkeypatch.setattr(builder, "build_together", watched)
    model = nn.Sequential(*(nn.Linear(D + n, D + n + 1) for n in range(4)))
    twins = Twins(Case(model.double(), output, (torch.randn(B, S, D).double(),)), GradVac)
    twins.step(UNSORTED)
    del alive[:]
    twins.step(SORTED)
    assert len(alive) == 8  # weights and shifts of four shapes
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] <= 1
