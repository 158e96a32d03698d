"""torch.compile: a compiled region is one node of the graph, and exact like any other."""

import copy
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from gradvac import Aligner, GradVac

from .parity import ONE_ABSENT, TASKS, UNSORTED, assert_same_gradients, attach
from .zoo._case import B, Block, D, HandWrittenNorm, Model, S, V, distance


def model_of_every_kind() -> nn.Module:
    """A tied table, a norm without fast path, and elementwise work to be compiled."""

    def run(m: Any, tokens: Tensor) -> Tensor:
        x = m.words(tokens) * 2.0 + 1.0
        result: Tensor = m.head(m.block(x).relu())
        return result

    model = Model(
        run,
        words=nn.Embedding(V, D),
        block=Block(HandWrittenNorm()),
        head=nn.Linear(D, V, bias=False),
    )
    model.head.weight = model.words.weight
    return model.double()


# Dynamo looks at `.grad` of every tensor that enters a graph after a break.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method"),
    pytest.mark.usefixtures("_fresh_compiler"),
]


@pytest.mark.parametrize("engine", ["one_backward", "auto"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model(backend: str, engine: str) -> None:
    model = model_of_every_kind()
    reference = copy.deepcopy(model)
    per_task = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    tokens = torch.randint(0, V, (B, S))
    compiled: Any = torch.compile(model, backend=backend)
    aligner = attach(compiled, GradVac(beta=0.3), engine=engine)
    assert list(aligner.components) == list(per_task.components)
    for tasks in (UNSORTED, ONE_ABSENT):
        per_task.backward(distance(reference(tokens)), tasks)
        aligner.backward(distance(compiled(tokens)), tasks)
        assert_same_gradients(model, reference, 1e-9)
        assert aligner.engine == "one_backward"


def test_regions_with_eager_layers_between() -> None:
    model = model_of_every_kind()
    reference = copy.deepcopy(model)
    model.block.forward = torch.compile(model.block.forward, backend="aot_eager")
    twins = [(reference, "per_task"), (model, "one_backward")]
    tokens = torch.randint(0, V, (B, S))
    for each, engine in twins:
        aligner = attach(each, GradVac(beta=0.3), engine=engine)
        for tasks in (UNSORTED, ONE_ABSENT):
            aligner.backward(distance(each(tokens)), tasks)
    assert_same_gradients(model, reference, 1e-9)


def test_with_default_settings() -> None:
    """The whole compiler, which saves memory in ways that allow one backward only.

    Products alone: a C++ compiler takes seconds for anything between them.
    """
    model = nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(3))).double()
    x = torch.randn(B, D, dtype=torch.float64)
    reference = copy.deepcopy(model)
    Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task").backward(
        distance(reference(x)), UNSORTED
    )
    # Torch's defaults, whatever ran before.
    defaults = functorch.patch(donated_buffer=True, force_non_lazy_backward_lowering=False)
    with fresh_cache(), defaults, torch.compiler.config.patch(cache_key_tag=""):
        compiled: Any = torch.compile(model)
        compiled(x).sum().backward()
        model.zero_grad()
        for engine in ("one_backward", "per_task", "auto"):
            aligner = attach(compiled, GradVac(beta=0.3), engine=engine)
            with pytest.raises(ValueError, match=r"compiled before.*torch\.compiler\.reset"):
                aligner.backward(distance(compiled(x)), UNSORTED)
        torch.compiler.reset()  # as the message says
        for engine in ("one_backward", "auto", "per_task"):
            model.zero_grad()
            aligner = attach(compiled, GradVac(beta=0.3), engine=engine)
            aligner.backward(distance(compiled(x)), UNSORTED)
            assert_same_gradients(model, reference, 1e-9)


class _Scaled(torch.autograd.Function):
    """Has a number among its arguments, for which it returns None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return factor * (x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return ctx.factor * gradient @ weight.t(), None, ctx.factor * x.t() @ gradient


@pytest.mark.filterwarnings("ignore:engine.*no fast path")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_numbers_among_the_arguments(is_compiled: bool) -> None:
    """A function returns something for them too; the graph has no edge for it.

    A region that was compiled for any size takes the sizes as numbers.
    """

    def run(m: Any, x: Tensor) -> Tensor:
        product = x @ m.matrix if is_compiled else _Scaled.apply(x, 2.0, m.matrix)
        result: Tensor = m.down(product)
        return result

    matrix = nn.Parameter(torch.randn(D, D))
    model = Model(run, matrix=matrix, down=nn.Linear(D, D)).double()
    reference = copy.deepcopy(model)
    called: Any = torch.compile(model, backend="aot_eager", dynamic=True) if is_compiled else model
    x = torch.randn(B, D, dtype=torch.float64)
    for each, engine in ((reference, "per_task"), (called, "one_backward")):
        attach(each, GradVac(), engine=engine).backward(distance(each(x)), UNSORTED)
    assert_same_gradients(model, reference, 1e-9)


def test_compiles_whole() -> None:
    """The Aligner is not in the way: one graph, and evaluation too."""
    model = model_of_every_kind()
    _aligner = attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    tokens = torch.randint(0, V, (B, S))
    torch.testing.assert_close(compiled(tokens), model(tokens))
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens))
