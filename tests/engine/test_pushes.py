"""Operations on parameters alone: pushed through once, T gradients at a time, and exactly."""

# B rows, T tasks, S tokens, D width

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradvac import Aligner, GradVac
from gradvac.engine import builder
from gradvac.engine.graph import Graph, call_node, kind_of
from gradvac.engine.pushes import ENTRYWISE, push_at_once

from .parity import SORTED, TASKS, UNSORTED, Twins, assert_same_gradients
from .zoo._case import B, Case, D, Model, S, distance, output
from .zoo.huggingface import t5_model, tokens_of, translation

OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": lambda a: a.abs(),
    "Clamp": lambda a: a.clamp(-0.5, 0.5),
    "ClampMax": lambda a: a.clamp_max(0.3),
    "ClampMin": lambda a: a.clamp_min(0.3),
    "Cos": lambda a: a.cos(),
    "Elu": lambda a: F.elu(a),
    "Erf": lambda a: a.erf(),
    "Exp": lambda a: a.exp(),
    "Exp2": lambda a: a.exp2(),
    "Expm1": lambda a: a.expm1(),
    "LeakyRelu": lambda a: F.leaky_relu(a),
    "Log": lambda a: a.abs().log(),
    "Log1P": lambda a: a.abs().log1p(),
    "Log2": lambda a: a.abs().log2(),
    "MaskedFill": lambda a: a.masked_fill(torch.eye(3, 4).bool(), 7.0),
    "Neg": lambda a: -a,
    "Pow": lambda a: a.abs() ** 2.5,
    "Reciprocal": lambda a: a.abs().reciprocal(),
    "Relu": lambda a: a.relu(),
    "Rsqrt": lambda a: a.abs().rsqrt(),
    "Sigmoid": lambda a: a.sigmoid(),
    "Silu": lambda a: F.silu(a),
    "Sin": lambda a: a.sin(),
    "Softplus": lambda a: F.softplus(a, beta=2.0),
    "Sqrt": lambda a: a.abs().sqrt(),
    "Tanh": lambda a: a.tanh(),
    "Tril": lambda a: a.tril(),
    "Triu": lambda a: a.triu(1),
    "Expand": lambda a: a[None].expand(5, 1, 3, 4),
    "View": lambda a: a.view(2, 6),
    "Unsqueeze": lambda a: a.unsqueeze(1),
    "Squeeze": lambda a: a[None].squeeze(0),
    "Permute": lambda a: a.view(3, 2, 2)[:, None].permute(-1, 0, 2, 1),
    "Transpose": lambda a: a.view(3, 2, 2).transpose(-1, 0),
    "T": lambda a: a.t(),
    "Clone": lambda a: a.clone(),
    "Slice": lambda a: torch.ops.aten.slice(a, -1, -3, -1, 2),
    "Cat": lambda a: torch.cat([a, a, a], -1),
    "Mm": lambda a: a @ a.t(),
    "Add": lambda a: torch.ops.aten.add.Scalar(a, 1.0),  # a kind of its own without a factor
}
OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Div": lambda a, b: a / b,
    "Maximum": lambda a, b: torch.maximum(a, b),
    "Minimum": lambda a, b: torch.minimum(a, b),
    "Mul": lambda a, b: a * b,
    "Rsub": lambda a, b: torch.rsub(a, b, alpha=3),
    "Sub": lambda a, b: torch.sub(a, b, alpha=3),
    "Where": lambda a, b: torch.where(torch.eye(3, 4).bool(), a, b),
    "Add": lambda a, b: torch.add(a, b, alpha=3),
    "Addmm": lambda a, b: torch.addmm(b.flatten()[-1:], a, a.t()),
}


def test_every_kind_has_a_case() -> None:
    assert {*OF_ONE, *OF_TWO} >= ENTRYWISE


@pytest.mark.parametrize("kind", OF_ONE)
def test_one_input_at_once_as_by_task(kind: str) -> None:
    check(kind, OF_ONE[kind](torch.randn(3, 4, dtype=torch.float64, requires_grad=True)))


@pytest.mark.parametrize("shape", [(1, 3, 4), (1, 4), ()])
@pytest.mark.parametrize("kind", OF_TWO)
def test_two_inputs_at_once_as_by_task(kind: str, shape: tuple[int, ...]) -> None:
    a = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    check(kind, OF_TWO[kind](a, torch.rand(shape, dtype=torch.float64, requires_grad=True)))


def check(kind: str, made: Tensor) -> None:
    """Compare what is pushed through an operation with calls of its node, one per task."""
    graph = Graph((made,))
    position = graph.root_positions[0]
    assert kind_of(graph.names[position]) == kind
    gradients = torch.randn(5, *made.shape, dtype=torch.float64)
    edges = [edge for edge, (child, _) in enumerate(graph.children(position)) if child >= 0]
    pushed = push_at_once(graph, position, edges, gradients)
    assert pushed is not None
    assert list(pushed) == edges
    for task, gradient in enumerate(gradients):
        returned = call_node(graph.nodes[position], [gradient])
        for edge in edges:
            expected = returned[edge]
            assert expected is not None
            expected = expected.sum_to_size(graph.shape(*graph.children(position)[edge]))
            torch.testing.assert_close(pushed[edge][task], expected, rtol=1e-15, atol=1e-15)


def test_what_two_inputs_share_is_no_memory_of_both() -> None:
    a, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    graph = Graph((a + b,))
    pushed = push_at_once(graph, graph.root_positions[0], [0, 1], torch.randn(2, 3).double())
    assert pushed is not None
    assert pushed[0].data_ptr() != pushed[1].data_ptr()


class Clone(torch.autograd.Function):
    """A model's own function, which has the name of an operation but does something else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return 3.0 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return 3.0 * gradient


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    # Both parameters get more than what arrives through what they share.
    "sum": lambda m, x: (x @ (m.a + m.b)).tanh() @ m.b + x @ m.a,
    "function": lambda m, x: (x @ Clone.apply(m.a)).tanh() @ Clone.apply(m.b),
    "shared by layers": lambda m, x: _repeat(x, torch.softmax(m.a * m.b, 0), 3),
    "parts": lambda m, x: _in_turn(x, torch.cat([m.a, m.b]).split(D)),
    "index": lambda m, x: x @ torch.cat([m.a, m.b])[torch.tensor([1, 0, -1] * 3)[:D]],
    "permuted": lambda m, x: (x @ m.a.permute(-1, 0)).tanh() @ m.b.transpose(0, -1),
}


def _repeat(x: Tensor, weight: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = (x @ weight).tanh()
    return x


def _in_turn(x: Tensor, weights: Any) -> Tensor:
    for weight in weights:
        x = (x @ weight).tanh()
    return x


def _complex(m: Any, x: Tensor) -> Tensor:
    """One part is real, and its gradient is."""
    whole = torch.cat([m.a, m.b * (1 + 2j)])
    return (x @ whole[:D].real).tanh() @ whole[-D:].imag + x @ whole.abs()[1 : D + 1]


USES["a complex whole"] = _complex
USES["nothing joined"] = lambda m, x: x @ torch.cat([m.a, m.b[:0, 0]]) + x @ m.b
USES["sparse factor"] = lambda m, x: x @ torch.mm(torch.eye(D).double().to_sparse(), m.a) @ m.b


def case(use: str) -> Case:
    a, b = (nn.Parameter(torch.randn(D, D).double() / 3) for _ in range(2))
    return Case(Model(USES[use], a=a, b=b), output, (torch.randn(B, S, D).double(),))


@pytest.mark.parametrize("options", [{}, {"stream_bytes": 1}, {"recompute": True}])
@pytest.mark.parametrize("use", USES)
def test_equals_per_task(use: str, options: dict[str, Any]) -> None:
    options = {"granularity": "all_matrix", **options}
    twins = Twins(case(use), lambda: GradVac(beta=0.3), **options)
    for tasks in (UNSORTED, SORTED, UNSORTED):
        twins.step(tasks)


def test_an_operation_that_does_not_broadcast() -> None:
    """GELU in float32 takes gradients of its own shape only, on a CPU."""
    model = Model(lambda m, x: x @ F.gelu(m.a), a=nn.Parameter(torch.randn(D, D)))
    twin, x = copy.deepcopy(model), torch.randn(B, D)
    for own, engine in ((model, "one_backward"), (twin, "per_task")):
        Aligner(own, TASKS, engine=engine).backward(distance(own(x)), UNSORTED)
    assert_same_gradients(model, twin, 1e-5)


@pytest.mark.parametrize("use", ["shared by layers", "parts"])
def test_losses_of_several_forwards_that_share_what_is_made_of_parameters(use: str) -> None:
    """What arrives is of one task here and of another there, also at outputs of one node."""
    found, expected = case(use), None
    for engine in ("per_task", "one_backward"):
        model = case(use).model if expected is None else found.model
        model.load_state_dict(found.model.state_dict())
        made = torch.cat([model.a, model.b]).split(D)  # type: ignore[list-item]
        aligner = Aligner(model, TASKS, engine=engine)
        x = found.inputs[0]
        losses = {
            "b": (x @ made[0]).square().sum(),
            "a": (x @ made[1]).sin().sum(),
            "c": (x @ made[0] @ made[1]).cos().sum() if use == "parts" else (x @ made[0]).sum(),
        }
        aligner.backward(losses)
        if expected is not None:
            assert_same_gradients(model, expected, 1e-12)
        expected = model


def test_a_bias_of_all_layers_is_pushed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = t5_model().double()
    of_rows = torch.tensor(UNSORTED)
    aligner = Aligner(model, TASKS, engine="one_backward", check=False)
    inputs = tokens_of(B, S), tokens_of(B, 4)
    aligner.backward(translation(model, of_rows, *inputs), of_rows)
    pushed: list[int] = []
    push = builder.GradientBuilder._push_through

    def counted(self: Any, position: int, arrived: Any) -> None:
        pushed.append(position)
        push(self, position, arrived)

    def refuse(*given: Any) -> None:
        raise AssertionError("called by task")

    monkeypatch.setattr(builder.GradientBuilder, "_push_through", counted)
    monkeypatch.setattr(builder.GradientBuilder, "_call", refuse)
    aligner.backward(translation(model, of_rows, *inputs), of_rows)
    assert pushed
    assert len(pushed) == len(set(pushed))
