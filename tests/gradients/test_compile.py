"""torch.compile of an attached model: its layers run between the compiled graphs."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("order", ["attach, then compile", "compile, then attach"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model(backend: str, order: str) -> None:
    model = model_of_every_kind()
    reference = copy.deepcopy(model)
    per_task = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    tokens = torch.randint(0, V, (B, S))
    if order.startswith("attach"):
        aligner = attach(model, GradVac(beta=0.3))
        compiled: Any = torch.compile(model, backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
        compiled(tokens)  # compiled without the aligner
        aligner = attach(compiled, GradVac(beta=0.3))
    assert list(aligner.components) == list(per_task.components)
    for tasks in (UNSORTED, ONE_ABSENT):
        per_task.backward(distance(reference(tokens)), tasks)
        aligner.backward(distance(compiled(tokens)), tasks)
        assert_same_gradients(model, reference, 1e-9)
        with torch.no_grad():
            torch.testing.assert_close(compiled(tokens), reference(tokens))


def test_detached_model_compiles_whole() -> None:
    model = model_of_every_kind()
    attach(model).detach()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    tokens = torch.randint(0, V, (B, S))
    torch.testing.assert_close(compiled(tokens), model(tokens))


def test_one_graph_is_refused_by_torch() -> None:
    model = model_of_every_kind()
    _aligner = attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        compiled(torch.randint(0, V, (B, S)))
