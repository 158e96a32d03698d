"""torch.compile(model, backend="gradvac"): parameters are left outside compiled regions."""

# B rows, S tokens, D width, V vocabulary

import copy
import gc
import importlib
import os
import subprocess
import sys
import tomllib
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends import registry
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import gradvac
from gradvac import Aligner, GradVac
from gradvac.engine import compile_tapped
from gradvac.engine import compiled as compiled_module
from gradvac.engine.compiled import region_inputs, split_and_compile
from gradvac.engine.graph import ANCHOR, COMPILED, RUN, TAPS, Graph
from gradvac.engine.passes import _EndHook
from gradvac.utils import torch_backend

from .parity import ONE_ABSENT, SORTED, TASKS, UNSORTED, assert_same_gradients
from .zoo._case import B, Block, D, HandWrittenNorm, Model, S, V, distance

# The same split, and no compiler to wait for.
uncompiled = partial(split_and_compile, compile_inside=aot_eager)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo looks at it
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection"),
    pytest.mark.usefixtures("_fresh_compiler"),
]


def model_of(run: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> nn.Module:
    torch.manual_seed(3)
    model = Model(run, **parts).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def every_rule() -> nn.Module:
    """A tied table, positions, products of all kinds, norms, a scale and a shift."""

    def run(m: Any, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = m.words(tokens) * 2.0 + m.positions(positions)
        x = m.norm(m.block(x)) * m.scale + m.shift
        x = torch.cat([m.first.expand(len(x), 1, D), x], 1) @ m.matrix
        x = x + torch.addmm(m.shift, m.rms(x).flatten(0, 1), m.matrix).relu_().view_as(x)
        logits: Tensor = m.head(x)
        return logits

    parts = {name: nn.Parameter(torch.empty(D)) for name in ("scale", "shift")}
    model = model_of(
        run,
        words=nn.Embedding(V, D, padding_idx=2),
        positions=nn.Embedding(S, D),
        block=Block(HandWrittenNorm()),
        norm=nn.LayerNorm(D),
        rms=nn.RMSNorm(D),
        first=nn.Parameter(torch.empty(1, 1, D)),
        matrix=nn.Parameter(torch.empty(D, D)),
        head=nn.Linear(D, V, bias=False),
        **parts,
    )
    model.head.weight = model.words.weight
    return model


def assert_exact(
    model: nn.Module, *batches: tuple[Tensor, ...], backend: Any = uncompiled, **options: Any
) -> Aligner:
    """Compare a plain backward and steps of an aligner with those of the model as written."""
    reference = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend=backend, **options)
    for each in (reference, compiled):
        distance(each(*batches[0])).sum().backward()
    assert_same_gradients(model, reference, 1e-9)
    per_task = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    aligner = Aligner(compiled, TASKS, GradVac(beta=0.3), engine="one_backward")
    every = (UNSORTED, ONE_ABSENT, SORTED)
    for step, batch in enumerate([*batches, *batches] if len(batches) > 1 else 3 * batches):
        tasks = every[(step + step // len(batches)) % 3]  # batches meet others than before
        for each in (model, reference):
            each.zero_grad()
        per_task.backward(distance(reference(*batch)), tasks)
        aligner.backward(distance(compiled(*batch)), tasks)
        assert_same_gradients(model, reference, 1e-9)
    return aligner


def test_every_rule() -> None:
    """No place is computed task by task, which would be a warning, and no owner is measured.

    Compiled for one length, then for any.
    """
    batches = [(torch.randint(0, V, (B, length)),) for length in (5, 3, 4)]
    assert "measured" not in repr(assert_exact(every_rule(), *batches))


class Layer(nn.Module):
    """A block that may add something, or write over what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, shift: Tensor | float = 0.0, *, over: bool = False) -> Tensor:
        result: Tensor = self.block(x.mul_(2.0) if over else x + shift)
        return result


def one_after_the_other(m: Any, x: Tensor) -> Tensor:
    return m.head(m.layers[1](m.layers[0](m.head(x))))


def with_a_shift_of_parameters(m: Any, x: Tensor) -> Tensor:
    shift = m.head.weight.exp().sum(0)
    return m.layers[1](m.layers[0](x, shift), shift)


def with_a_shift_that_stays_inside(m: Any, x: Tensor) -> Tensor:
    shift = torch.erf(m.head.weight).sum(0)
    return m.layers[1](m.layers[0](x, shift), shift)


def with_a_shift_of_rows(m: Any, x: Tensor) -> Tensor:
    shift = m.head(x)
    return m.layers[1](m.layers[0](x, shift), shift)


def one_over_the_other(m: Any, x: Tensor) -> Tensor:
    return m.layers[1](m.layers[0](m.head(x)), over=True)


def inside_a_context(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.layers[1](m.layers[0](m.head(x)))


def beside_a_context(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.square().mean((1, 2), keepdim=True)
    return m.layers[1](m.layers[0](x * scale)) + m.head(x)


def with_a_buffer_that_another_writes(m: Any, x: Tensor) -> Tensor:
    y = m.layers[0](x, m.seen)
    m.seen.copy_(y.detach().mean((0, 1)))
    return m.layers[1](y) + m.head(x)


@pytest.mark.parametrize(
    ("run", "num_regions"),
    [
        (one_after_the_other, 4),
        (with_a_shift_of_rows, 3),
        (beside_a_context, 3),
        (with_a_shift_of_parameters, 2),
        (with_a_shift_that_stays_inside, 1),
        (one_over_the_other, 1),
        (with_a_buffer_that_another_writes, 1),
        (inside_a_context, 1),
    ],
)
def test_layers_are_regions_of_their_own(run: Any, num_regions: int) -> None:
    """Unless one writes over what another made, or is of parameters in a way that has no rule."""
    model = model_of(run, head=nn.Linear(D, D), layers=nn.ModuleList([Layer(), Layer()]))
    model.register_buffer("seen", torch.ones(D).double())
    x = torch.randn(B, S, D, dtype=torch.float64)
    compiled: Any = torch.compile(model, backend=uncompiled)
    names = Graph([compiled(x).sum()]).names
    assert names.count(COMPILED) == num_regions
    torch.compiler.reset()
    assert_exact(model, (x,), (x + 1,))


class Attention(nn.Module):
    """Of entries to each other, with biases of positions of its own, or those of another."""

    def __init__(self, biases: nn.Embedding | None = None) -> None:
        super().__init__()
        self.block, self.biases = Block(), biases

    def forward(
        self, x: Tensor, is_shown: Tensor | None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.biases is not None
            apart = torch.arange(x.shape[1])[None] - torch.arange(x.shape[1])[:, None]
            buckets: Any = 0
            buckets += (apart > 0).long() * 2
            buckets += apart.abs().clamp(max=1)
            bias = self.biases(buckets).permute(2, 0, 1)[None]
        shown = bias if is_shown is None else torch.where(is_shown[:, None, None], bias, -9.0)
        heads = self.block(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=shown)
        return mixed.transpose(1, 2).flatten(-2), bias


@pytest.mark.parametrize("is_masked", [False, True])
def test_biases_of_positions(is_masked: bool) -> None:
    """As in T5: the first layer looks them up, all add them, some masked by row."""

    def run(m: Any, x: Tensor, is_shown: Tensor) -> Tensor:
        x, bias = m.layers[0](x, is_shown if is_masked else None)
        result: Tensor = m.layers[1](x, is_shown if is_masked else None, bias)[0]
        return result

    layers = nn.ModuleList([Attention(nn.Embedding(4, 2)), Attention()])
    model = model_of(run, layers=layers)
    batches = [(torch.randn(B, n, D).double(), torch.rand(B, n) < 0.7) for n in (S, S + 2)]
    names = Graph([torch.compile(model, backend=uncompiled)(*batches[0]).sum()]).names
    assert names.count(COMPILED) == 2
    torch.compiler.reset()
    assert "measured" not in repr(assert_exact(model, *batches, dynamic=True))


def test_a_bias_of_more_heads_than_there_are_keys_for() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        heads = m.up(x).unflatten(-1, (4, -1)).transpose(1, 2)
        keys = heads[:, :2]
        mixed = F.scaled_dot_product_attention(heads, keys, keys, m.bias, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(-2)

    model = model_of(run, up=nn.Linear(D, D), bias=nn.Parameter(torch.empty(4, S, S)))
    assert "measured" not in repr(assert_exact(model, (torch.randn(B, S, D).double(),)))


def test_layers_that_nothing_comes_back_to() -> None:
    """Regions give zeros where torch gives nothing, to biases too, along which no rows lie."""

    def run(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.layers[1](m.layers[0](x), None)[0].detach() * m.scale
        return result

    layers = nn.ModuleList([Layer(), Attention(nn.Embedding(4, 2))])
    model = model_of(run, layers=layers, scale=nn.Parameter(torch.empty(D)))
    reference, x = copy.deepcopy(model), torch.randn(B, B + 1, D).double()
    compiled: Any = torch.compile(model, backend=uncompiled)
    for each, engine in ((reference, "per_task"), (compiled, "one_backward")):
        aligner = Aligner(each, TASKS, GradVac(beta=0.3), engine=engine)
        aligner.backward(distance(each(x)), UNSORTED)
        aligner.backward(distance(each(x)), UNSORTED)
    torch.testing.assert_close(model.scale.grad, reference.scale.grad)
    assert not any(parameter.grad.any() for parameter in model.layers.parameters())


@pytest.mark.filterwarnings("ignore:engine.*no fast path.*CompiledFunction")
def test_layers_compiled_one_by_one_that_share_biases() -> None:
    """What a layer is given is then like rows to it: measured, and exact."""

    def run(m: Any, x: Tensor) -> Tensor:
        x, bias = m.layers[0](x, None)
        result: Tensor = m.layers[1](x, None, bias)[0]
        return result

    model = model_of(run, layers=nn.ModuleList([Attention(nn.Embedding(4, 2)), Attention()]))
    reference, x = copy.deepcopy(model), torch.randn(B, S, D).double()
    for layer in model.layers:
        layer.compile(backend=uncompiled)
    for each, engine in ((reference, "per_task"), (model, "one_backward")):
        aligner = Aligner(each, TASKS, GradVac(beta=0.3), engine=engine)
        aligner.backward(distance(each(x)), UNSORTED)
    assert_same_gradients(model, reference, 1e-9)


def test_sizes_that_change() -> None:
    model = model_of(
        lambda m, x: m.norm(m.up(torch.cat([m.first.expand(len(x), 1, D), x], 1))) * m.scale,
        up=nn.Linear(D, D),
        norm=nn.LayerNorm(D),
        first=nn.Parameter(torch.empty(1, 1, D)),
        scale=nn.Parameter(torch.empty(D)),
    )
    batches = [(torch.randn(B, length, D).double(),) for length in (5, 3)]
    assert "measured" not in repr(assert_exact(model, *batches, dynamic=True))


def test_inductor() -> None:
    model = model_of(
        lambda m, x: m.up(m.norm(x)).tanh() @ m.matrix,
        norm=nn.LayerNorm(D),
        up=nn.Linear(D, D),
        matrix=nn.Parameter(torch.empty(D, 2)),
    )
    aligner = assert_exact(model, (torch.randn(B, S, D).double(),), backend=compile_tapped)
    assert "measured" not in repr(aligner)


def test_a_path_is_enough_for_the_name_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no installer has been torch finds it, or is told if it has looked before."""
    program = (
        "import sys, gradvac; from importlib.metadata import entry_points\n"
        "(found,) = entry_points(group='torch_dynamo_backends')\n"
        "print(found.name, found.value, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(gradvac.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert done.stdout.split() == ["gradvac", "gradvac.engine:compile_tapped", "False"]
    for known in (registry._BACKENDS, registry._COMPILER_FNS):
        monkeypatch.delitem(known, "gradvac", raising=False)
    torch_backend.announce()
    assert registry.lookup_backend("gradvac").__module__ == torch_backend.__name__


def test_the_name_of_the_backend_in_the_metadata() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    module, name = project["project"]["entry-points"]["torch_dynamo_backends"]["gradvac"].split(":")
    assert getattr(importlib.import_module(module), name) is compile_tapped


def linear(**parts: nn.Module | nn.Parameter) -> dict[str, Any]:
    return {"up": nn.Linear(D, D), "down": nn.Linear(D, D), **parts}


@pytest.mark.parametrize(
    ("run", "parts", "shape"),
    [
        (lambda m, x: m.down(F.prelu(m.up(x), m.slope)), {"slope": nn.Parameter(torch.ones(D))}, 2),
        (lambda m, x: m.down(m.conv(m.up(x).mT).mT), {"conv": nn.Conv1d(D, D, 3, padding=1)}, 3),
        (lambda m, x: m.down(checkpoint(m.inner, m.up(x), use_reentrant=False)), "inner", 3),
        (lambda m, x: m.down(m.up(x)) + m.up.weight.sum(), {}, 3),  # of a weight that is tapped too
    ],
    ids=["prelu", "convolution", "checkpoint", "weight"],
)
@pytest.mark.filterwarnings("ignore:engine.*no fast path.*CompiledFunction")
def test_uses_without_a_rule(run: Any, parts: Any, shape: int) -> None:
    parts = {"inner": nn.Linear(D, D)} if parts == "inner" else parts
    x = torch.randn(*(B, S, D)[-shape:] if shape == 3 else (B, D)).double()
    assert_exact(model_of(run, **linear(**parts)), (x,))


def shifted_by_the_batch(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.down(F.linear(x, m.matrix, m.up(x).mean(0)))
    return result


def shifted_by_erf(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.down(torch.addmm(torch.erf(m.scale), m.up(x), m.matrix))
    return result


def written_over(m: Any, x: Tensor) -> Tensor:
    matrix, scale, shift = m.matrix * 2, m.scale * 2, m.scale * 3
    F.relu(matrix, inplace=True)
    F.leaky_relu(scale, 0.1, True)
    shift.data.mul_(2)
    result: Tensor = m.down(m.up(x) @ matrix * scale + shift)
    return result


def read_while_it_is_written(m: Any, x: Tensor) -> Tensor:
    scale, other, shift = m.scale * 2, m.scale * 3, m.scale * 4
    before, view = scale * 5, other.view(-1)
    scale += 1.0
    other += 1.0
    shift[0] = 1.0
    result: Tensor = m.down(m.up(x) * scale * other + shift + before * view)
    return result


def completed_by_rows(m: Any, x: Tensor) -> Tensor:
    scale, shift = m.scale.expand(len(x), D) * 1.0, torch.zeros(B, D).double()
    scale *= m.up(x)
    shift += m.scale
    shift *= m.up(x)
    number = (m.scale > 0).double()
    number *= m.up(x).mean(1, keepdim=True).expand(B, D)[0]
    result: Tensor = m.down(scale + shift)
    return result + number


def without_history(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        shift = m.scale * 2
    result: Tensor = m.down(m.up(x) + shift)
    return result


def masked_by_a_scale(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.down(m.up(x) * (m.scale > 0) + (9 * m.scale).long() * x + m.scale)
    return result


def differentiated(m: Any, x: Tensor) -> Tensor:
    slope = torch.func.grad(lambda z: (m.up(z).tanh() * m.scale).sum())
    result: Tensor = m.down(slope(x))
    return result


@pytest.mark.parametrize(
    "run",
    [
        *(shifted_by_the_batch, shifted_by_erf, written_over, read_while_it_is_written),
        *(completed_by_rows, without_history, masked_by_a_scale, differentiated),
    ],
)
@pytest.mark.filterwarnings("ignore:engine.*no fast path.*CompiledFunction")
def test_values_a_tap_must_not_stand_for(run: Any) -> None:
    """Not made of parameters alone, written over, without a gradient, or inside another one."""
    matrix, scale = nn.Parameter(torch.empty(D, D)), nn.Parameter(torch.empty(D))
    model = model_of(run, **linear(matrix=matrix, scale=scale))
    assert_exact(model, (torch.randn(B, D).double(),))


@torch.library.custom_op("gradvac_tests::count", mutates_args={"seen"})
def count(seen: Tensor, rows: Tensor) -> None:
    seen.add_(rows.sum(0))


def test_buffers_are_read_after_their_update() -> None:
    """Whoever writes: torch counts some writes, and others not."""

    def run(m: Any, x: Tensor) -> Tensor:
        hidden = m.up(x)
        rows = hidden.detach()
        count(m.by_operator, rows)
        torch.mean(rows, 0, out=m.as_result)
        torch._foreach_add_([m.first, m.by_list], [rows[0], rows[1]])
        m.by_view[:2].add_(rows[2, :2])
        m.norm(hidden)
        buffers = (m.by_operator, m.as_result, m.by_list, m.by_view, m.norm.running_mean)
        result: Tensor = m.down(hidden) * sum(m.scale * buffer for buffer in buffers)
        return result

    parts = linear(norm=nn.BatchNorm1d(D), scale=nn.Parameter(torch.empty(D)))
    model = model_of(run, **parts)
    for name in ("by_operator", "as_result", "first", "by_list", "by_view"):
        model.register_buffer(name, torch.ones(D).double())
    reference, x = copy.deepcopy(model), torch.randn(B, D).double()
    torch.testing.assert_close(torch.compile(model, backend=uncompiled)(x), reference(x))


def test_outputs_beside_a_buffer_that_is_written() -> None:
    """Torch hands out the buffer in place of an input that a region writes over."""

    def run(m: Any, x: Tensor) -> Tensor:
        scale = m.scale.expand(len(x), D) * 1.0
        scale += x.erf()
        m.state += x
        return scale.tanh()

    model, x = model_of(run, scale=nn.Parameter(torch.empty(D))), torch.randn(B, D).double()
    model.register_buffer("state", torch.zeros(B, D).double())
    reference = copy.deepcopy(model)
    torch.testing.assert_close(torch.compile(model, backend=uncompiled)(x), reference(x))


def scaled_by_what_is_written(m: Any, x: Tensor, _: Tensor) -> Tensor:
    m.view.add_(1.0)
    result: Tensor = m.down(m.up(x) * m.scale * m.base)
    return result


def added_where_it_is_written(m: Any, x: Tensor, others: Tensor) -> Tensor:
    m.view.mul_(0.5)
    result: Tensor = m.down(x * m.base + m.scale) + m.up(others) * m.scale
    return result


def read_before_it_is_written(m: Any, x: Tensor, _: Tensor) -> Tensor:
    hidden = m.layers[0](x) + m.row  # a layer ends before what reads and writes
    m.piece.add_(1.0)
    result: Tensor = m.down(hidden * (m.scale * 2))
    return result


@pytest.mark.parametrize(
    "run", [scaled_by_what_is_written, added_where_it_is_written, read_before_it_is_written]
)
@pytest.mark.filterwarnings("ignore:engine.*no fast path.*CompiledFunction")
def test_a_view_of_a_buffer_is_written(run: Any) -> None:
    """Torch makes one input of both, and puts all in another order."""
    layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(D))])
    model = model_of(run, **linear(scale=nn.Parameter(torch.empty(D)), layers=layers))
    model.register_buffer("base", torch.ones(D).double())
    model.register_buffer("view", model.base[:2])
    model.register_buffer("whole", torch.ones(2, D).double())
    model.register_buffer("row", model.whole[1])
    model.register_buffer("piece", model.whole.view(-1)[3:9])
    assert_exact(model, (torch.randn(B, D).double(), torch.randn(B, D).double()))


def test_a_weight_used_by_its_value_alone() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            matrix = m.matrix.t()
        result: Tensor = m.down(m.up(x) @ matrix)
        return result

    model = model_of(run, **linear(matrix=nn.Parameter(torch.empty(D, D))))
    assert_exact(model, (torch.randn(B, D).double(),))


@pytest.mark.parametrize(
    "run", [lambda m, x: x * m.number, lambda m, x: torch.where(x > 0, x, m.number)]
)
def test_a_number_keeps_the_dtype(run: Any) -> None:
    model = model_of(run, number=nn.Parameter(torch.empty(())))
    y = torch.compile(model, backend=uncompiled)(torch.randn(B, D))
    assert y.dtype == torch.float32


def test_an_operand_of_several_products_is_kept_once() -> None:
    """Under autocast it is cast, and each product would keep a copy of its own."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.one(x) * m.other(x)

    model = model_of(run, one=nn.Linear(D, D), other=nn.Linear(D, D)).float()
    called = torch.compile(model, backend=uncompiled)
    with torch.autocast("cpu", torch.bfloat16):
        output = called(torch.randn(B, S, D))
    node: Any = output.grad_fn
    kept = {one.data_ptr() for one in node.saved_tensors if one.numel() == B * S * D}
    assert len(kept) == 3  # the operand, and both factors


def test_an_output_that_is_an_input() -> None:
    """Its node is that of the region before, where rows move; they lie in order when looked at."""

    def first(m: Any, x: Tensor, order: Tensor) -> Tensor:
        result: Tensor = (m.up(x)[order].tanh() @ m.matrix)[order.argsort()]
        return result

    def second(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.contiguous(), m.down(x)

    model = model_of(first, **linear(matrix=nn.Parameter(torch.empty(D, D))))
    reference, regions = (
        copy.deepcopy(model),
        [torch.compile(f, backend=uncompiled) for f in (first, second)],
    )
    aligners = [
        Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task"),
        Aligner(model, TASKS, GradVac(beta=0.3), engine="one_backward"),
    ]
    x = torch.randn(B, D).double()
    for order in (
        torch.arange(B),
        torch.arange(B),
        torch.arange(B).flip(0),
        torch.arange(B).roll(1),
    ):
        for each, aligner, run in zip(
            (reference, model), aligners, ((first, second), regions), strict=True
        ):
            one, other = run[1](each, run[0](each, x, order))
            aligner.backward(distance(one + other), UNSORTED)
    assert_same_gradients(model, reference, 1e-9)


def test_rows_that_move() -> None:
    """Sorted by what the data say: owners are measured every step."""

    def run(m: Any, x: Tensor) -> Tensor:
        order = m.up(x).detach().sum(1).argsort()
        result: Tensor = m.down(m.up(x)[order].tanh())[order.argsort()]
        return result

    aligner = assert_exact(model_of(run, **linear()), (torch.randn(B, D).double(),))
    assert "measured every step" in repr(aligner)


@pytest.mark.filterwarnings("ignore:engine.*no fast path.*CompiledFunction")
@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"sparse": True}], ids=str)
def test_tables_of_other_kinds(options: dict[str, Any]) -> None:
    """One that a lookup writes over, and is tied; one whose gradient is sparse."""
    is_tied = "max_norm" in options
    model = model_of(
        lambda m, t: m.down(m.words(t)) @ (m.words.weight.t() if is_tied else m.up.weight),
        **linear(words=nn.Embedding(V, D, **options)),
    )
    assert_exact(model, (torch.randint(0, V, (B, S)),))


@pytest.mark.filterwarnings("ignore:engine.*no fast path.*CompiledFunction")
@pytest.mark.parametrize(
    "run",
    [
        lambda m, x, y: m.down(x + y),
        lambda _, x, y: (x + y).tanh(),
        lambda m, x, y: in_another_region((x + in_another_region(y)).sin()) * m.down(x),
    ],
    ids=["with others", "alone", "in another region"],
)
def test_a_lookup_for_all_rows(run: Any) -> None:
    """Positions that come with the batch: what all rows share is pushed through the region."""
    model = model_of(
        lambda m, x, positions: run(m, x, m.table(positions)),
        down=nn.Linear(D, D),
        table=nn.Embedding(S, D),
    )
    assert_exact(model, (torch.randn(B, S, D).double(), torch.arange(S)[None]))


def in_another_region(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def _product(dtype: torch.dtype, requires_grad: tuple[bool, bool | None]) -> tuple[Any, ...]:
    weight, bias = torch.randn(5, D, requires_grad=requires_grad[0]), None
    if requires_grad[1] is not None:
        bias = torch.randn(5, requires_grad=requires_grad[1])
    return weight, bias, (B, S, 5), (B, S, D), dtype


def _lookup(padding: int, *, requires_grad: bool = True) -> tuple[Any, ...]:
    return torch.randn(V, 5, requires_grad=requires_grad), padding, (B, S, 5), (B, S)


TAPS_OF = {
    "weight and bias": _product(torch.float32, (True, True)),
    "a weight alone": _product(torch.float32, (True, None)),
    "a bias that is frozen": _product(torch.float64, (True, False)),
    "a weight that is frozen": _product(torch.float64, (False, True)),
    "in half precision": _product(torch.bfloat16, (True, True)),
    "a table": _lookup(-1),
    "a table with padding": _lookup(2),
    "a frozen table": _lookup(2, requires_grad=False),
}


@pytest.mark.parametrize("name", TAPS_OF)
@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("absent", [(), (0,), (1,)], ids=str)
def test_a_tap_is_the_same_in_cpp(
    kernels: Any,
    name: str,
    is_second: bool,
    absent: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its placeholders, the gradients it computes without an aligner, and theirs."""
    request = TAPS_OF[name]
    leaves = [one for one in request[:2] if isinstance(one, Tensor) and one.requires_grad]
    values: list[list[Tensor | None]] = []
    operand = torch.randint(0, V, (B, S)) if len(request) == 4 else torch.randn(B, S, D)
    gradients = [torch.randn(B, S, 5), operand]
    for module in (kernels, None):
        monkeypatch.setattr(compiled_module, "native", lambda module=module: module)
        with torch.no_grad():
            assert not any(one.requires_grad for one in region_inputs(request))
        outputs = region_inputs(request)
        (node,) = {one.grad_fn for one in outputs}
        assert (node.name() in TAPS) == (module is None)
        starts = [g.to(o.dtype) for g, o in zip(gradients, outputs, strict=True)]
        starts[0].requires_grad_(is_second)
        given = [
            (o, g) for n, (o, g) in enumerate(zip(outputs, starts, strict=True)) if n not in absent
        ]
        found = torch.autograd.grad(
            *([o for o, _ in given], [ANCHOR, *leaves], [g for _, g in given]),
            allow_unused=True,
            create_graph=is_second,
        )
        again = [one.square().sum() for one in found if one is not None and one.requires_grad]
        if again:
            found = (*found, *torch.autograd.grad(again, starts[:1]))
        assert bool(again) == (is_second and not absent and bool(leaves))
        values.append([*outputs, *found])
    for mine, theirs in zip(*values, strict=True):
        if theirs is not None or mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=0.0, atol=0.0)


def test_what_a_region_is_given_is_the_same_in_cpp(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value without its gradient, and one with an entry for every entry it serves."""
    scale = nn.Parameter(torch.randn(D))
    for module in (kernels, None):
        monkeypatch.setattr(compiled_module, "native", lambda module=module: module)
        value, every = region_inputs((scale,), (scale, (B, S, D)))
        assert value.data_ptr() == every.data_ptr() == scale.data_ptr()
        assert not value.requires_grad
        assert every.shape == (B, S, D)
        assert every.grad_fn.metadata == {RUN: None}
        with torch.no_grad():
            assert region_inputs((scale, (B, D)))[0].grad_fn is None
        frozen = region_inputs((scale.detach(), (B, D)))[0]
        assert frozen.grad_fn is None


@pytest.mark.parametrize("is_in_cpp", [False, True])
def test_anomalies_are_looked_for(
    kernels: Any, is_in_cpp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch keeps its notes at nodes, too."""
    module = kernels if is_in_cpp else None
    monkeypatch.setattr(compiled_module, "native", lambda: module)
    with torch.autograd.set_detect_anomaly(True):
        assert_exact(every_rule(), (torch.randint(0, V, (B, S)),))


@pytest.mark.filterwarnings("ignore:engine.*no fast path.*CompiledFunction")
def test_rows_that_mix() -> None:
    """Inside a region: its outputs still have rows, so that it is computed task by task."""
    model = model_of(lambda m, x: m.down(m.up(x) - m.up(x).mean(0)), **linear())
    assert_exact(model, (torch.randn(B, D).double(),))
    compiled: Any = torch.compile(model, backend=uncompiled)
    aligner = Aligner(compiled, TASKS, GradVac(), engine="one_backward")
    y = compiled(torch.randn(B, D).double())
    with pytest.raises(ValueError, match="influence each other"):
        aligner.backward(distance(y - y.mean(0)), UNSORTED)


def test_regions_one_after_the_other() -> None:
    model = every_rule()

    def run(m: Any, tokens: Tensor) -> Tensor:
        x = m.words(tokens)
        torch._dynamo.graph_break()
        x = m.norm(m.block(x))
        torch._dynamo.graph_break()
        logits: Tensor = m.head(x)
        return logits

    model.run = run  # type: ignore[assignment]
    for unused in (model.positions, model.rms):
        unused.requires_grad_(False)
    assert_exact(model, (torch.randint(0, V, (B, S)),))


def test_another_graph_of_the_same_structure() -> None:
    """What was learned of one region is not taken for known of another."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.up(x)
        y = y if m.is_first else y.flip(0)
        result: Tensor = m.down(y.tanh())
        return result if m.is_first else result.flip(0)

    model = model_of(run, **linear())
    model.is_first = True  # type: ignore[assignment]
    reference = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend=uncompiled)
    per_task = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    aligner = Aligner(compiled, TASKS, GradVac(beta=0.3), engine="one_backward")
    x = torch.randn(B, D).double()
    for is_first in (True, True, True, False, False, True):
        for each in (model, reference):
            each.is_first = is_first  # type: ignore[assignment]
        per_task.backward(distance(reference(x)), UNSORTED)
        aligner.backward(distance(compiled(x)), UNSORTED)
    assert_same_gradients(model, reference, 1e-9)


def test_a_weight_that_is_not_the_models() -> None:
    """It gets its plain gradient, while the bias beside it is the aligner's."""
    outside = nn.Parameter(torch.randn(D, D).double())
    model = model_of(lambda m, x: F.linear(m.up(x), outside, m.shift), **linear())
    model.shift = nn.Parameter(torch.randn(D).double())
    reference = copy.deepcopy(model)
    assert_exact(model, (torch.randn(B, D).double(),))
    x, outside.grad = torch.randn(B, D).double(), None
    compiled: Any = torch.compile(model, backend=uncompiled)
    Aligner(compiled, TASKS, GradVac(), engine="one_backward").backward(
        distance(compiled(x)), UNSORTED
    )
    (expected,) = torch.autograd.grad(distance(reference(x)).sum(), outside)
    torch.testing.assert_close(outside.grad, expected)


def test_without_gradients_inside() -> None:
    """What is made of a weight under `no_grad` has no gradient, wherever it is used."""

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = m.up.weight.t() * 2.0
        result: Tensor = m.down(m.up(x) @ frozen)
        return result

    assert_exact(model_of(run, **linear()), (torch.randn(B, D).double(),))


def test_an_output_that_wakes_up() -> None:
    """Its rows lie along another dimension than those of the first."""
    model = model_of(lambda m, x: (m.down(m.up(x)), m.up(x).sin().transpose(0, 1)), **linear())
    reference = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend=uncompiled)
    per_task = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    aligner = Aligner(compiled, TASKS, GradVac(beta=0.3), engine="one_backward")
    x = torch.randn(B, B, D).double()
    for factor in (0.0, 0.0, 0.0, 1.0, 1.0):
        for each, own in ((reference, per_task), (compiled, aligner)):
            first, second = each(x)
            own.backward(distance(first) + factor * distance(second.transpose(0, 1)), UNSORTED)
    assert_same_gradients(model, reference, 1e-9)


def test_a_scale_and_what_is_made_of_it() -> None:
    """A pass that ends at the scale leaves alone what is between it and its other uses."""
    model = model_of(lambda m, x: m.up(x) * m.scale.exp() + m.down(x) * m.scale, **linear())
    model.scale = nn.Parameter(torch.randn(D).double())
    assert_exact(model, (torch.randn(B, D).double(),))


class _Rows(torch.autograd.Function):
    """A lookup that takes for granted that it gets a gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens)
        ctx.num = len(table)
        return table[tokens]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.num, D).index_add(0, tokens, gradient), None


@pytest.mark.filterwarnings("ignore:engine.*no fast path.*_Rows")
def test_functions_at_which_a_pass_ends() -> None:
    """They are not called with less than a backward gives them; `retain_grad` sees it too."""
    kept: list[Tensor] = []

    @torch._dynamo.disable
    def look_up(table: Tensor, tokens: Tensor) -> Tensor:
        kept.append(_Rows.apply(table, tokens))
        kept[-1].retain_grad()
        return kept[-1]

    model = model_of(lambda m, tokens: m.down(look_up(m.table, tokens)), **linear())
    model.table = nn.Parameter(torch.randn(V, D).double())
    assert_exact(model, (torch.randint(0, V, (B,)),))
    theirs, ours = kept[-2:]
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_is_made_of_parameters_alone_leaves_a_region() -> None:
    """One without a tap, behind the layers, beside rows."""

    def run(m: Any, x: Tensor) -> Tensor:
        y, matrix = m.layers[1](m.layers[0](x)).tanh(), m.matrix * 2
        result: Tensor = torch._dynamo.disable(torch.matmul)(y, matrix)
        return result

    layers, matrix = nn.ModuleList([Layer(), Layer()]), nn.Parameter(torch.empty(D, 3))
    model = model_of(run, layers=layers, matrix=matrix)
    assert_exact(model, (torch.randn(B, S, D).double(),))


def test_torchs_contracts() -> None:
    """Hooks run once, a graph can be kept, and what the region held goes with it."""
    model = model_of(lambda m, x: m.down(m.up(x).tanh()), **linear())
    compiled: Any = torch.compile(model, backend=uncompiled)
    Aligner(compiled, TASKS, GradVac())  # lets backwards run twice
    seen: list[Tensor] = []
    handle = model.up.weight.register_hook(seen.append)
    x = torch.randn(B, D).double()
    y = compiled(x)
    y.sum().backward(retain_graph=True)
    first = model.up.weight.grad.clone()
    y.sum().backward()
    handle.remove()
    torch.testing.assert_close(model.up.weight.grad, 2 * first)
    assert len(seen) == 2
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    hidden = torch.randn(B, D, requires_grad=True).double()
    held, y = weakref.ref(hidden), compiled(hidden)
    y.sum().backward()
    del hidden, y
    gc.collect()
    assert held() is None
    total = compiled(x).sum()
    with pytest.raises(RuntimeError, match=r"double backward|once_differentiable"):
        torch.autograd.grad(total, model.up.weight, create_graph=True)[0].sum().backward()


def test_second_derivatives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.13 gradients of weights would be constants."""
    monkeypatch.setattr(compiled_module, "_MAY_BE_CONSTANT", True)
    model = model_of(lambda m, x: m.down(m.up(x).tanh()), **linear())
    compiled: Any = torch.compile(model, backend=uncompiled)
    for _ in range(2):  # one region, run twice
        total, weights = compiled(torch.randn(B, D).double()).sum(), list(model.parameters())
        with pytest.raises(RuntimeError, match="call the model that is not compiled"):
            torch.autograd.grad(total, weights, create_graph=True, retain_graph=True)
        torch.autograd.grad(total, weights)


def test_graphs_of_regions_are_refused() -> None:
    with pytest.raises(Exception, match="record the whole step"):
        torch.compile(nn.Linear(D, D), backend=compile_tapped, mode="reduce-overhead")(
            torch.randn(B, D)
        )


def test_ends_of_passes_in_two_threads_keep_their_hooks() -> None:
    """One thread is switched away from between naming its hooks and hanging them on the node."""
    hung: dict[str, object] = {}

    class Node:
        metadata: ClassVar[dict[str, object]] = {}

        def __init__(self, name: str, then: Callable[[], None] = lambda: None) -> None:
            self.name, self.then = name, then

        def _register_hook_dict(self, like: Tensor) -> None:
            self.then()
            hung[self.name] = like._backward_hooks

    def other() -> None:
        thread = Thread(target=lambda: made.append(_EndHook(Node("other"), 1, print)))
        thread.start()
        thread.join()

    made: list[_EndHook] = []
    made.append(_EndHook(Node("first", other), 1, print))
    assert hung["other"] is made[0]._hooks
    assert hung["first"] is made[1]._hooks
