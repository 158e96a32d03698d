"""Uses that wait are formed together; each must come to what it comes to alone."""

# N entries, T tasks, D width

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, GradVac, Sum
from gradvac.engine import contributions
from gradvac.engine.contributions import Contribution, NormScale, OuterProduct, SharedShift
from gradvac.engine.graph import Graph
from gradvac.engine.junctions import find_junctions
from gradvac.engine.kernels import Segments

ROWS, PER_ROW, D, T = 6, 5, 4, 3
SORTED, MIXED = [0, 0, 1, 1, 2, 2], [2, 0, 1, 0, 2, 2]
UNEVEN = [0, 0, 0, 2, 2, 0]  # and a task without rows


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def product(segments: Segments) -> tuple[OuterProduct, SharedShift]:
    gradient = numbers(ROWS * PER_ROW, D)
    outer = OuterProduct(gradient, numbers(ROWS * PER_ROW, 7), segments, gradient)
    return outer, SharedShift(outer)


def untransposed(segments: Segments) -> tuple[OuterProduct, SharedShift]:
    gradient = numbers(ROWS * PER_ROW, D)
    outer = OuterProduct(numbers(ROWS * PER_ROW, D), gradient, segments, gradient)
    return outer, SharedShift(outer)


def norm(segments: Segments) -> tuple[NormScale, SharedShift]:
    gradient, x = numbers(ROWS, PER_ROW, D), numbers(ROWS, PER_ROW, D)
    mean, scale = x.mean(-1, keepdim=True), numbers(ROWS, PER_ROW, 1)
    normed = NormScale(gradient, x, mean, scale, segments)
    return normed, SharedShift(normed)


def by_task(values: Tensor, owner: Tensor) -> Tensor:
    """Sums over the entries of each task."""
    return torch.stack([values[owner == task].sum(0) for task in range(T)])


def expected(use: Contribution, owner: Tensor) -> Tensor:
    if isinstance(use, OuterProduct):
        return by_task(use.left[:, :, None] * use.right[:, None], owner)
    if isinstance(use, NormScale):
        assert use.mean is not None
        values = use.output * (use.x - use.mean) * use.scale
        return by_task(values.flatten(0, 1), owner)
    assert isinstance(use, SharedShift)
    assert use.output is not None
    return by_task(use.output.reshape(-1, D), owner)


@pytest.mark.parametrize("tasks", [SORTED, MIXED, UNEVEN])
@pytest.mark.parametrize("make", [product, untransposed, norm])
@pytest.mark.parametrize("many", [1, 3])
def test_together_as_alone(
    make: Callable[[Segments], tuple[Contribution, SharedShift]], tasks: Sequence[int], many: int
) -> None:
    segments = Segments(torch.tensor(tasks), T, torch.device("cpu"))
    owner = torch.tensor(tasks).repeat_interleave(PER_ROW)
    pairs = [make(segments) for _ in range(many)]
    uses, shifts = [use for use, _ in pairs], [shift for _, shift in pairs]
    wanted = [[expected(use, owner) for use in own] for own in (uses, shifts)]
    joined = [*shifts[0].join(shifts)]
    for own, results in zip((uses, shifts), wanted, strict=True):
        assert len({use.kind for use in own}) == 1
        for use, found, result in zip(own, own[0].build(own), results, strict=True):
            assert use.may_wait
            torch.testing.assert_close(found, result.flatten(1), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(use.task_gradients(), result, rtol=1e-12, atol=1e-12)
    for together in (joined, shifts[0].join(shifts)):  # before and after some were formed
        total = sum(use.task_gradients() for use in together)
        torch.testing.assert_close(total, sum(wanted[1]))


def test_a_shift_does_not_need_what_it_is_beside() -> None:
    segments = Segments(torch.tensor(MIXED), T, torch.device("cpu"))
    owner = torch.tensor(MIXED).repeat_interleave(PER_ROW)
    _, shift = product(segments)
    wanted = expected(shift, owner)
    torch.testing.assert_close(shift.build([shift])[0], wanted)


@pytest.mark.usefixtures("_nothing_is_held")
def test_a_shift_beside_a_scale_that_did_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a kernel leaves the sums of both: those of the shift are kept for when it comes."""
    sums, calls = contributions.norm_sums, []

    def like_the_kernel(gradient: Tensor, x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        *_, segments, many = given
        calls.append(many)
        by_shift = segments.sum(gradient.view(many, -1, x.shape[-1]))
        return sums(gradient, x, *given)[0], by_shift

    monkeypatch.setattr(contributions, "norm_sums", like_the_kernel)
    monkeypatch.setattr(contributions, "_SMALL_BYTES", (0, 0))
    monkeypatch.setattr(SharedShift, "task_gradients", lambda self: self._sums)  # nothing else
    model = nn.Sequential(
        nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)
    ).double()
    x, rows = numbers(ROWS, 5), [0, 2, 1, 0, 2, 1]
    found = []
    for engine in ("per_task", "one_backward"):
        aligner = Aligner(model, ["a", "b", "c"], GradVac(target=0.3), "all_layer", engine=engine)
        for _ in range(2):
            model.zero_grad()
            aligner.backward((model(x) - x[:, :4]).square().sum(1), rows)
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert calls
    torch.testing.assert_close(found[1], found[0])


class WritesOverGradient(torch.autograd.Function):
    """In memory that no counter of versions sees, as a kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return 3.0 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        gradient.data.mul_(3.0)
        return gradient


class WritingScale(torch.autograd.Function):
    """The same, with a parameter of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        of_x, of_scale = gradient * scale, (gradient * x).sum((0, 1))
        gradient.data.mul_(7.0)
        return of_x, of_scale


class Branches(nn.Module):
    """A function beside products, a norm and a lookup that get the same gradient before it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.below, self.beside, self.above = (nn.Linear(D, D) for _ in range(3))
        self.from_input, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.table = nn.Embedding(50, D)
        self.scale, self.way = nn.Parameter(torch.randn(D)), way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.below(x).sin()
        if self.way == "without a parameter":
            changed = WritesOverGradient.apply(hidden * self.scale)
        elif self.way == "by a hook":
            changed = (hidden * self.scale).cos()
            changed.register_hook(lambda gradient: gradient.data.mul_(3.0))
        else:
            changed = WritingScale.apply(x if self.way == "at the input" else hidden, self.scale)
        tokens = torch.arange(x.shape[1]).expand(x.shape[:2])
        every = self.beside(hidden) + self.norm(hidden) + self.from_input(x) + self.table(tokens)
        return self.above(every + changed)


@pytest.mark.parametrize("engine", ["one_backward", "auto"])
@pytest.mark.parametrize("options", [{}, {"stream_bytes": 1}, {"table_bytes": 1}], ids=str)
@pytest.mark.parametrize(
    "way", ["without a parameter", "with a parameter", "at the input", "by a hook"]
)
@pytest.mark.parametrize("tasks", [MIXED, [1] * ROWS], ids=["mixed", "one task"])
def test_what_writes_over_an_output_gradient(
    options: dict[str, Any], engine: str, tasks: list[int], way: str
) -> None:
    model = Branches(way).double()
    x = numbers(ROWS, PER_ROW, D)
    aligner = Aligner(model, ["a", "b", "c"], Sum(), engine=engine, **options)
    for _ in range(4):
        model(x).square().sum().backward()
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        aligner.backward(model(x).square().sum((1, 2)), tasks)
        assert aligner.engine == "one_backward"
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_functions_of_cpp_are_given_copies() -> None:
    """Here one of TorchScript's, which writes over nothing."""

    @torch.jit.script
    def gate(x: Tensor) -> Tensor:
        return torch.tanh(2.0 * x) * torch.sigmoid(x) + 1.0

    first, last = nn.Linear(D, D), nn.Linear(D, D)
    for _ in range(3):  # it is optimised on the way
        graph = Graph([last(gate(first(numbers(ROWS, D).float()))).sum(1)])
    parameters = {*first.parameters(), *last.parameters()}
    partition = find_junctions(graph, parameters, lambda _: ROWS, ())
    assert ["Graph" in graph.names[position] for position in partition.writers] == [True]
