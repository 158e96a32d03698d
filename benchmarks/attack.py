"""Random models against one_backward: its gradients must be those of per_task, or be refused.

    OMP_NUM_THREADS=1 python benchmarks/attack.py --models 500        # some minutes
    OMP_NUM_THREADS=1 python benchmarks/attack.py --first 137 --models 1 --verbose
    GRADVAC_NATIVE=1 OMP_NUM_THREADS=1 python benchmarks/attack.py --steps 14 --sizes 2

A seed draws a directed graph of parts that nobody writes side by side: layers whose weights are
shared, views and writes in place, lookups and scatters, convolutions, recurrence, attention,
functions of somebody's own, checkpoints, hooks, `vmap`, parametrizations, two dtypes, rows in other
dimensions, sorted, routed, packed, in groups, parts that some steps skip; and of tasks, sizes of
batches, forms of losses and options, which change from step to step. Each model takes six steps in
float64, with updates. What is written in C++ takes over where graphs come again: batches of few
sizes, and more steps.

`exact`: as per_task. `refused`: a part is there to be refused, mostly because it makes rows
influence each other. Anything else is a finding: `wrong`, `crash`, or `needless`, a refusal
although rows are apart.
"""

# B rows, S entries of a row, D width, C channels, N entries of the batch, T tasks

import argparse
import copy
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from gradvac import Aligner, Sum

D, S, C, SIDE = 8, 5, 4, 4  # a power of two, others, and what a row is as a picture
TASKS = ["a", "b", "c", "d"]
STEPS = 6


class Batch(NamedTuple):
    """What all parts may see: tasks of rows `[B]`, lengths `[B]`, numbers of the step."""

    tasks: Tensor
    lengths: Tensor
    step: int


Run = Callable[[Tensor, Batch], Tensor]
Part = Callable[["Draw"], Run]
PARTS: dict[str, Part] = {}
MIXING = (
    *("mixed_by_batch_norm", "mixed_by_the_mean", "mixed_by_attention_over_rows"),
    *("mixed_by_a_hook_that_begins", "clipped_before_a_parameter"),
    *("hidden_by_a_reentrant_checkpoint", "nested_rows"),
)


def part(make: Part) -> Part:
    """`[B, S, D]` -> `[B, S, D]`, with parameters of its own or of other parts."""
    PARTS[make.__name__] = make
    return make


class Draw:
    """Draws a model: its numbers, and the parameters that parts ask for."""

    def __init__(self, seed: int) -> None:
        self.random, self.model = random.Random(seed), nn.Module()
        torch.manual_seed(seed)

    def add(self, module: nn.Module) -> Any:
        name = f"part{len(self.model._modules)}"
        self.model.add_module(name, module)
        return Held(name)

    def parameter(self, *shape: int, scale: float = 0.5) -> Any:
        name = f"parameter{len(self.model._parameters)}"
        self.model.register_parameter(name, nn.Parameter(scale * torch.randn(shape)))
        return Held(name)

    def linear(self, inputs: int = D, outputs: int = D) -> Any:
        """A layer, sometimes one that there is already."""
        every = [
            name
            for name, one in self.model.named_children()
            if type(one) is nn.Linear and one.weight.shape == (outputs, inputs)
        ]
        if every and self.random.random() < 0.3:
            return Held(self.random.choice(every))
        return self.add(nn.Linear(inputs, outputs, bias=self.random.random() < 0.7))

    def one_of(self, *choices: Any) -> Any:
        return self.random.choice(choices)


@dataclass
class Held:
    """A module or parameter by its name: a copy of the model has its own."""

    name: str

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.here(*given, **named)

    @property
    def here(self) -> Any:
        """That of the model whose turn it is."""
        return getattr(TURN[-1], self.name)


TURN: list[nn.Module] = []


# -- layers --------------------------------------------------------------------------------------


@part
def linear(draw: Draw) -> Run:
    layer, act = draw.linear(), draw.one_of(torch.tanh, F.gelu, F.silu, torch.sin)
    return lambda x, _: act(layer(x))


@part
def tied_the_other_way(draw: Draw) -> Run:
    layer = draw.linear()
    return lambda x, _: layer(x).tanh() @ layer.here.weight


@part
def norms(draw: Draw) -> Run:
    layer = draw.add(draw.one_of(nn.LayerNorm, nn.RMSNorm)(D))
    return lambda x, _: layer(x)


@part
def norm_over_a_whole_row(draw: Draw) -> Run:
    scale, shift = draw.parameter(S, D), draw.parameter(S, D)
    return lambda x, _: F.layer_norm(x, (S, D), scale.here, shift.here)


@part
def hand_written_norm(draw: Draw) -> Run:
    scale = draw.parameter(D)
    return lambda x, _: (1 + scale.here) * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@part
def gated(draw: Draw) -> Run:
    up, down = draw.linear(D, 2 * D), draw.linear()
    return lambda x, _: down(F.glu(up(x)))


@part
def prelu(draw: Draw) -> Run:
    layer = draw.add(nn.PReLU(draw.one_of(1, S)))
    return lambda x, _: layer(x)


@part
def temperature(draw: Draw) -> Run:
    scalar, shift = draw.parameter(), draw.parameter(1, S, 1)
    return lambda x, _: x * scalar.here.exp() + shift.here / (1 + scalar.here**2)


@part
def bilinear(draw: Draw) -> Run:
    layer = draw.add(nn.Bilinear(D, D, D))
    return lambda x, _: layer(x, x.roll(1, -1)).tanh()


@part
def einsums(draw: Draw) -> Run:
    weight = draw.parameter(2, D, D // 2)
    return lambda x, _: torch.einsum("bsd,hde->bshe", x, weight.here).flatten(2)


@part
def einsum_over_entries(draw: Draw) -> Run:
    weight = draw.parameter(S, S)
    return lambda x, _: torch.einsum("bsd,st->btd", x, weight.here)


@part
def weight_on_the_left(draw: Draw) -> Run:
    weight = draw.parameter(S, S)
    return lambda x, _: weight.here @ x


@part
def low_rank(draw: Draw) -> Run:
    base, down, up = draw.linear(), draw.parameter(2, D), draw.parameter(D, 2)
    return lambda x, _: F.linear(x, base.here.weight.detach() + up.here @ down.here)


@part
def weight_made_by_a_network(draw: Draw) -> Run:
    make, seed = draw.linear(D, D), draw.parameter(D, D)
    return lambda x, _: x @ make(seed.here).tanh()


@part
def parametrized(draw: Draw) -> Run:
    how = draw.one_of(
        parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm
    )
    layer = draw.add(how(nn.Linear(D, D)).eval())
    return lambda x, _: layer(x)


class Narrow(nn.Linear):
    """In float32, whatever the others are."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.double(), self.bias.double())


class Autocast(Narrow):
    """The same under autocast: bf16."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(input.float(), self.weight, self.bias).double()


@part
def two_dtypes(draw: Draw) -> Run:
    layer = draw.add(Narrow(D, D))
    return lambda x, _: layer(x)


@part
def complex_numbers(draw: Draw) -> Run:
    real, imaginary = draw.parameter(D // 2), draw.parameter(D // 2)

    def run(x: Tensor, _: Batch) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.complex(real.here, imaginary.here)).flatten(2)

    return run


@part
def fourier(draw: Draw) -> Run:
    weight, dim = draw.parameter(1, 3, 1), draw.one_of(1, 2)

    def run(x: Tensor, _: Batch) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=dim)
        scaled = spectrum * (1 + (weight.here if dim == 1 else weight.here.mean()))
        return torch.fft.irfft(scaled, n=x.shape[dim], dim=dim)

    return run


@part
def learned_constants(draw: Draw) -> Run:
    layer, positions = draw.linear(), draw.add(nn.Embedding(2 * S, D))

    def run(x: Tensor, _: Batch) -> Tensor:
        return x + layer(positions(torch.arange(x.shape[1]) + 1)).tanh()

    return run


@part
def dropped(draw: Draw) -> Run:
    layer = draw.linear()
    return lambda x, _: F.dropout(layer(x), 0.3)


@part
def gradient_of_itself(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, _: Batch) -> Tensor:
        y = layer(x).tanh()
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + slope

    return run


@part
def statistics_without_gradient(draw: Draw) -> Run:
    layer = draw.linear()
    return lambda x, _: layer(x - x.mean(0).detach()) / (1 + x.detach().std(0))


@part
def solved_row_by_row(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, _: Batch) -> Tensor:
        y = layer(x)
        return torch.linalg.solve(y.mT @ y + 5 * torch.eye(D).to(y), x.mT).mT

    return run


@part
def distances_to_centres(draw: Draw) -> Run:
    centres, back = draw.parameter(3, D), draw.linear(3, D)
    return lambda x, _: back(torch.cdist(x, centres.here.expand(len(x), 3, D)))


@part
def frozen(draw: Draw) -> Run:
    module = nn.Linear(D, D)
    module.weight.requires_grad_(False)
    layer = draw.add(module)
    return lambda x, _: layer(x).tanh()


@part
def a_kernel_for_every_row(draw: Draw) -> Run:
    kernel = draw.parameter(S, 1, 3)

    def run(x: Tensor, _: Batch) -> Tensor:
        kernels = kernel.here.repeat(len(x), 1, 1)
        return F.conv1d(x.reshape(1, -1, D), kernels, padding=1, groups=len(kernels)).view(x.shape)

    return run


@part
def side_by_side(draw: Draw) -> Run:
    layer, scales = draw.linear(), draw.parameter(2, 1, 1, D)
    return lambda x, _: (torch.stack([layer(x), x.cos()]) * scales.here).logsumexp(0)


@part
def weight_made_of_weights(draw: Draw) -> Run:
    small, vector, weight = draw.parameter(2, 2), draw.parameter(D), draw.parameter(D, D)
    make: Callable[[], Tensor] = draw.one_of(
        lambda: torch.outer(vector.here, vector.here.sin()),
        lambda: torch.block_diag(small.here, weight.here[: D - 2, 2:]),
        lambda: torch.kron(small.here, weight.here[:4, ::2]),
        lambda: torch.diag_embed(vector.here) + weight.here.triu(1),
        lambda: torch.linalg.matrix_exp(weight.here - weight.here.T),
        lambda: 0.5 * (weight.here + weight.here.T),
        lambda: F.normalize(weight.here, dim=1) * vector.here.exp(),
        lambda: weight.here.index_select(0, torch.arange(D).flip(0)).cumsum(0),
        lambda: torch.cat([weight.here[1:], vector.here[None]]).roll(3, 1),
    )
    return lambda x, _: F.linear(x, make(), make()[0]).tanh()


@part
def weight_twice_in_one_operation(draw: Draw) -> Run:
    weight, way = draw.parameter(D, D, scale=0.2), draw.one_of(0, 1, 2)

    def run(x: Tensor, _: Batch) -> Tensor:
        w = weight.here
        if way == 0:
            return torch.addmm(w[0], x.flatten(0, 1), w, alpha=0.5).view(x.shape)
        return torch.einsum("bsd,de,ef->bsf", x, w, w.T) if way == 1 else x @ w @ w @ x.mT @ x

    return run


@part
def complex_weight(draw: Draw) -> Run:
    pairs = draw.parameter(D, D, 2)

    def run(x: Tensor, _: Batch) -> Tensor:
        found = x.to(torch.complex128) @ torch.view_as_complex(pairs.here)
        return found.real * found.angle() + found.abs()

    return run


@part
def einsums_of_other_orders(draw: Draw) -> Run:
    weight = draw.parameter(D, D)
    how, back = draw.one_of(
        ("bsd,ed->ebs", (1, 2, 0)), ("bsd,de->seb", (2, 0, 1)), ("sbd,ed->bes", (2, 0, 1))
    )
    given = (lambda x: x.transpose(0, 1)) if how[0] == "s" else (lambda x: x)

    def run(x: Tensor, _: Batch) -> Tensor:
        found = torch.einsum(how, given(x), weight.here)
        return found.permute(*back) if how[0] == "b" else found.transpose(1, 2)

    return run


@part
def network_by_row(draw: Draw) -> Run:
    make = draw.linear(D, D * D)

    def run(x: Tensor, _: Batch) -> Tensor:
        return torch.bmm(x, make(x.mean(1)).view(-1, D, D).tanh())

    return run


@part
def bags(draw: Draw) -> Run:
    how, lengths = draw.one_of("sum", "mean", "max"), draw.one_of(True, False)
    table = draw.add(nn.EmbeddingBag(9, D, mode=how))

    def run(x: Tensor, batch: Batch) -> Tensor:
        tokens = (3 * x.detach().sum(-1)).long().abs() % 9
        if not lengths:
            return x + table(tokens)[:, None]
        mask = torch.arange(S) < batch.lengths[:, None]
        offsets = F.pad(batch.lengths.cumsum(0), (1, -1))
        return x + table(tokens[mask], offsets)[:, None]

    return run


@part
def sparse_table(draw: Draw) -> Run:
    table = draw.add(nn.Embedding(7, D, sparse=True, padding_idx=draw.one_of(None, 2)))
    return lambda x, _: x + table((3 * x.detach().sum(-1)).long().abs() % 7).sin()


@part
def detached_branches(draw: Draw) -> Run:
    layer, other = draw.linear(), draw.linear()

    def run(x: Tensor, _: Batch) -> Tensor:
        y = layer(x)
        rounded = y + (y.round() - y).detach()  # a straight-through estimator
        with torch.no_grad():
            gate = other(x).sigmoid()
        return rounded * gate + other(x.detach()).tanh()

    return run


@part
def last_steps_keys(draw: Draw) -> Run:
    layer, cache = draw.linear(D, 2 * D), dict[int, Tensor]()

    def run(x: Tensor, batch: Batch) -> Tensor:
        key, value = layer(x).chunk(2, -1)
        before = cache.get(id(TURN[-1]))
        if before is not None:
            key = torch.cat([before.expand(len(x), -1, -1), key], 1)
            value = torch.cat([before.sin().expand(len(x), -1, -1), value], 1)
        if batch.step % 2:
            cache[id(TURN[-1])] = x.detach().mean(0, keepdim=True)
        return F.scaled_dot_product_attention(x, key, value)

    return run


@part
def narrow_inside(draw: Draw) -> Run:
    layer = draw.add(Autocast(D, D))
    return lambda x, _: layer(x)


# -- views, writes in place, indices -------------------------------------------------------------


@part
def halves(draw: Draw) -> Run:
    one, other = draw.linear(D // 2, D // 2), draw.linear(D // 2, D // 2)

    def run(x: Tensor, _: Batch) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([second + one(first), other(second).sin()], -1)

    return run


@part
def written_in_place(draw: Draw) -> Run:
    layer, token, way = draw.linear(), draw.parameter(D), draw.one_of(0, 1, 2, 3)

    def run(x: Tensor, _: Batch) -> Tensor:
        y = layer(x)
        if way == 0:
            y[:, 0] = token.here
        elif way == 1:
            y[..., : D // 2] *= x[..., D // 2 :]
        elif way == 2:
            y = y.transpose(0, 1)
            y[1:3] += token.here
            return y.transpose(0, 1)
        else:
            y.add_(x).mul_(token.here)
        return y

    return run


@part
def buffer_filled_by_step(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, _: Batch) -> Tensor:
        out, state = torch.zeros_like(x), x[:, 0]
        for step in range(x.shape[1]):
            state = layer(state + x[:, step]).tanh()
            out[:, step] = state
        return out

    return run


@part
def gathered(draw: Draw) -> Run:
    layer, way = draw.linear(), draw.one_of(0, 1, 2, 3)

    def run(x: Tensor, _: Batch) -> Tensor:
        y = layer(x)
        order = y.detach().sum(-1).argsort(1)
        if way == 0:
            return y.gather(1, order[..., None].expand_as(y))
        if way == 1:
            return torch.zeros_like(y).scatter_add(1, order[..., None].expand_as(y), y)
        if way == 2:
            return y.index_select(1, torch.arange(S).flip(0)) + y.sort(1).values
        return y[torch.arange(len(y))[:, None], order]

    return run


@part
def reduced_by_segment(draw: Draw) -> Run:
    layer, how = draw.linear(), draw.one_of("amax", "mean", "sum")

    def run(x: Tensor, _: Batch) -> Tensor:
        y = layer(x)
        where = (torch.arange(S) // 2).view(1, S, 1).expand_as(y)
        return torch.zeros_like(y).scatter_reduce(1, where, y, how)

    return run


@part
def best_entries(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, _: Batch) -> Tensor:
        values, where = layer(x).topk(3, -1)
        return torch.zeros_like(x).scatter(-1, where, values.softmax(-1))

    return run


@part
def scans(draw: Draw) -> Run:
    layer, way = draw.linear(), draw.one_of(torch.cumsum, torch.logcumsumexp, torch.cumprod)
    return lambda x, _: way(layer(x).tanh(), 1)


@part
def windows(draw: Draw) -> Run:
    layer = draw.linear(3 * D, D)

    def run(x: Tensor, _: Batch) -> Tensor:
        padded = F.pad(x, (0, 0, 1, 1))
        return layer(padded.unfold(1, 3, 1).flatten(2))

    return run


@part
def strided(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, _: Batch) -> Tensor:
        y = layer(x).contiguous()
        return y.as_strided(y.shape, y.stride()) + y.flip(1).movedim(0, 1).swapaxes(0, 1)

    return run


@part
def masked(draw: Draw) -> Run:
    layer, fill = draw.linear(), draw.parameter()

    def run(x: Tensor, _: Batch) -> Tensor:
        y = layer(x)
        return torch.where(x > 0, y, fill.here) + y.masked_fill(x < -0.5, 0.3)

    return run


@part
def looked_up_by_content(draw: Draw) -> Run:
    table = draw.add(nn.Embedding(7, D))
    return lambda x, _: x + table((3 * x.detach().sum(-1)).long().abs() % 7)


@part
def weight_of_the_task(draw: Draw) -> Run:
    weights, shifts = draw.parameter(len(TASKS), D, D), draw.add(nn.Embedding(len(TASKS), D))

    def run(x: Tensor, batch: Batch) -> Tensor:
        return torch.bmm(x, weights.here[batch.tasks]) + shifts(batch.tasks)[:, None]

    return run


@part
def put_in_place(draw: Draw) -> Run:
    layer, token, way = draw.linear(), draw.parameter(D), draw.one_of(0, 1, 2, 3, 4)

    def run(x: Tensor, batch: Batch) -> Tensor:
        y = layer(x)
        mask = torch.arange(S) >= batch.lengths[:, None]
        row, entry = torch.arange(len(x))[:, None], x.detach().sum(-1).argsort(1)
        if way == 0:
            y[mask] = token.here
        elif way == 1:
            y.masked_fill_(mask[..., None], 0.5).clamp_(-1, 1)
        elif way == 2:
            y = y.index_put((row, entry // 2), x.sin(), accumulate=True)
        elif way == 3:
            y[:, 1].index_copy_(0, row[:, 0].flip(0), x[:, 2].flip(0) * token.here)
        else:
            y = y.flatten(0, 1)
            y[mask.flatten()] *= token.here
            y = y.view(x.shape)
        return y

    return run


@part
def scattered(draw: Draw) -> Run:
    layer, way = draw.linear(), draw.one_of(0, 1, 2, 3)

    def run(x: Tensor, _: Batch) -> Tensor:
        y = layer(x)
        order = y.detach().argsort(1)
        if way == 0:
            return x.scatter(1, order, y.sin())
        if way == 1:
            return x.slice_scatter(y[:, 1:3], 1, 2, 4) + x.select_scatter(y[:, 0], 1, 3)
        if way == 2:
            return torch.take_along_dim(y, order, 1) + y.diagonal(0, 1, 2).sum(-1)[:, None, None]
        return x.index_add(1, torch.tensor([0, 0, 3]), y[:, :3]).index_copy(
            1, torch.tensor([4, 1]), y[:, 2:4]
        )

    return run


# -- attention, recurrence, pictures -------------------------------------------------------------


@part
def attention(draw: Draw) -> Run:
    layers, bias, causal = draw.linear(D, 3 * D), draw.parameter(2, S, S), draw.one_of(True, False)

    def run(x: Tensor, _: Batch) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in layers(x).chunk(3, -1))
        if causal:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = ((q @ k.mT + bias.here).softmax(-1)) @ v
        return out.transpose(1, 2).flatten(2)

    return run


@part
def module_of_attention(draw: Draw) -> Run:
    first = draw.one_of(True, False)
    layer = draw.add(nn.MultiheadAttention(D, 2, batch_first=first, add_bias_kv=not first))

    def run(x: Tensor, batch: Batch) -> Tensor:
        mask = torch.arange(S) >= batch.lengths[:, None]
        given = x if first else x.transpose(0, 1)
        out: Tensor = layer(given, given, given, key_padding_mask=mask)[0]
        return out if first else out.transpose(0, 1)

    return run


@part
def recurrent(draw: Draw) -> Run:
    first, kind = draw.one_of(True, False), draw.one_of(nn.LSTM, nn.GRU, nn.RNN)
    layer = draw.add(kind(D, D // 2, batch_first=first, bidirectional=True))
    return lambda x, _: layer(x)[0] if first else layer(x.transpose(0, 1))[0].transpose(0, 1)


@part
def packed_recurrent(draw: Draw) -> Run:
    layer = draw.add(nn.LSTM(D, D, batch_first=True))

    def run(x: Tensor, batch: Batch) -> Tensor:
        packed = pack_padded_sequence(x, batch.lengths, True, enforce_sorted=False)
        return x + pad_packed_sequence(layer(packed)[0], True, total_length=S)[0]

    return run


@part
def cells(draw: Draw) -> Run:
    cell = draw.add(draw.one_of(nn.GRUCell, nn.RNNCell)(D, D))

    def run(x: Tensor, _: Batch) -> Tensor:
        states = [x[:, 0]]
        for entry in x.unbind(1):
            states.append(cell(entry, states[-1]))
        return torch.stack(states[1:], 1)

    return run


@part
def convolution_in_time(draw: Draw) -> Run:
    groups = draw.one_of(1, 2, D)
    layer = draw.add(nn.Conv1d(D, D, 3, padding=1, groups=groups))
    return lambda x, _: layer(x.mT).mT


@part
def pictures(draw: Draw) -> Run:
    into, back = draw.linear(S * D, C * SIDE * SIDE), draw.linear(C * SIDE * SIDE, S * D)
    steps = [draw.random.choice(PICTURES)(draw) for _ in range(draw.random.randint(1, 3))]

    def run(x: Tensor, _: Batch) -> Tensor:
        picture = into(x.flatten(1)).view(-1, C, SIDE, SIDE)
        for step in steps:
            picture = step(picture)
        picture = F.adaptive_avg_pool2d(picture, SIDE)
        return back(picture.flatten(1)).view(x.shape)

    return run


def _layer(make: Callable[["Draw"], nn.Module]) -> Callable[["Draw"], Callable[[Tensor], Tensor]]:
    return lambda draw: draw.add(make(draw))


def _squeeze(draw: Draw) -> Callable[[Tensor], Tensor]:
    gate = draw.linear(C, C)
    return lambda p: p * gate(p.mean((2, 3))).sigmoid()[..., None, None]


def _sampled(draw: Draw) -> Callable[[Tensor], Tensor]:
    theta = draw.parameter(2, 3)

    def run(p: Tensor) -> Tensor:
        grid = F.affine_grid(theta.here.expand(len(p), 2, 3).clone(), list(p.shape))
        return F.grid_sample(p, grid)

    return run


def _folded(draw: Draw) -> Callable[[Tensor], Tensor]:
    layer = draw.linear(4 * C, 4 * C)

    def run(p: Tensor) -> Tensor:
        size = p.shape[2:]
        return F.fold(layer(F.unfold(p, 2).mT).mT, size, 2)

    return run


PICTURES: list[Callable[[Draw], Callable[[Tensor], Tensor]]] = [
    _layer(lambda draw: nn.Conv2d(C, C, 3, padding=draw.one_of(0, 1), groups=draw.one_of(1, 2, C))),
    _layer(
        lambda draw: nn.Conv2d(
            C, C, 3, padding=1, padding_mode=draw.one_of("reflect", "circular", "replicate")
        )
    ),
    _layer(lambda draw: nn.ConvTranspose2d(C, C, 2, stride=draw.one_of(1, 2))),
    _layer(lambda draw: nn.GroupNorm(draw.one_of(1, 2, C), C)),
    _layer(lambda _: nn.InstanceNorm2d(C, affine=True)),
    _layer(lambda _: nn.BatchNorm2d(C).eval()),
    _layer(lambda _: nn.PReLU(C)),
    lambda _: lambda p: F.max_pool2d(p, 2, 1),
    lambda _: lambda p: F.avg_pool2d(p, 2, 1, padding=1),
    lambda _: lambda p: F.interpolate(p, scale_factor=2, mode="bilinear"),
    lambda _: lambda p: F.pixel_unshuffle(F.pixel_shuffle(p, 2), 2),
    lambda _: lambda p: F.local_response_norm(p, 3),
    lambda _: lambda p: F.adaptive_max_pool2d(p, 3),
    _squeeze,
    _sampled,
    _folded,
]


@part
def grouped_queries(draw: Draw) -> Run:
    query, pairs = draw.linear(D, 2 * D), draw.linear(D, D)

    def run(x: Tensor, _: Batch) -> Tensor:
        q = query(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (y.unflatten(-1, (1, -1)).transpose(1, 2) for y in pairs(x).chunk(2, -1))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).unflatten(-1, (2, D)).mean(2)

    return run


@part
def packed_both_ways(draw: Draw) -> Run:
    kind = draw.one_of(nn.GRU, nn.RNN)
    layer = draw.add(kind(D, D // 2, num_layers=2, bidirectional=True))

    def run(x: Tensor, batch: Batch) -> Tensor:
        packed = pack_padded_sequence(x.transpose(0, 1), batch.lengths, enforce_sorted=False)
        found, last = layer(packed)
        padded = pad_packed_sequence(found, total_length=S)[0].transpose(0, 1)
        return padded + last[-2:].transpose(0, 1).flatten(1)[:, None]

    return run


@part
def projected_state(draw: Draw) -> Run:
    layer = draw.add(nn.LSTM(D, 2 * D, proj_size=D, batch_first=True))
    start = draw.parameter(1, 1, D)

    def run(x: Tensor, _: Batch) -> Tensor:
        state = start.here.expand(1, len(x), D).contiguous()
        return layer(x, (state, torch.cat([state, state.tanh()], -1)))[0]

    return run


@part
def causal_convolutions(draw: Draw) -> Run:
    groups = draw.one_of(1, D)
    down = draw.add(nn.Conv1d(D, D, 3, groups=groups))
    up = draw.add(nn.ConvTranspose1d(D, D, 2, stride=2, groups=draw.one_of(1, 2)))
    return lambda x, _: up(F.silu(down(F.pad(x.mT, (2, 0)))))[..., 1 : 2 * S : 2].mT


# -- functions, checkpoints, hooks, vmap ---------------------------------------------------------


class Scaled(torch.autograd.Function):
    """Entry by entry, with a parameter; writes over what it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        of_scale = (gradients[0] * x).sum((0, 1))
        return gradients[0].mul_(scale), of_scale


class Turned(torch.autograd.Function):
    """Somebody's own way to turn rows round, there and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.flip(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
        return gradients[0].flip(0)


@part
def own_function(draw: Draw) -> Run:
    scale = draw.parameter(D)
    # What it writes over is its own: torch forbids anything else.
    return lambda x, _: 1.5 * Scaled.apply(x.sin(), scale.here)


@part
def own_function_that_moves_rows(draw: Draw) -> Run:
    layer = draw.linear()
    return lambda x, _: Turned.apply(layer(Turned.apply(x)).tanh())


@part
def checkpointed(draw: Draw) -> Run:
    one, other = draw.linear(), draw.linear()
    return lambda x, _: checkpoint(lambda y: other(one(y).tanh()), x, use_reentrant=False)


@part
def watched(draw: Draw) -> Run:
    layer, begin = draw.linear(), draw.random.randint(0, STEPS)
    factor = draw.one_of(-1.0, 0.5, None)

    def run(x: Tensor, batch: Batch) -> Tensor:
        y: Tensor = layer(x)
        if batch.step >= begin and y.requires_grad:
            y.register_hook(lambda g: None if factor is None else factor * g)
        return y

    return run


@part
def watched_module(draw: Draw) -> Run:
    module = nn.Linear(D, D)
    module.register_full_backward_hook(lambda *_: None)
    layer = draw.add(module)
    return lambda x, _: layer(x)


@part
def mapped_over_rows(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, _: Batch) -> Tensor:
        return torch.vmap(lambda row: F.linear(row, layer.here.weight).tanh().cumsum(0))(x)

    return run


@part
def called_functionally(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, _: Batch) -> Tensor:
        halved = {name: 0.5 * p for name, p in layer.here.named_parameters()}
        return torch.func.functional_call(layer.here, halved, (x,))

    return run


class Pair(torch.autograd.Function):
    """Two outputs of which one is used, a number, a constant, and a weight of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, power: int, shift: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.power = power
        return (x @ weight).pow(power), x + shift

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        inner = gradients[0] * ctx.power * (x @ weight).pow(ctx.power - 1)
        of_weight = x.flatten(0, 1).T @ inner.flatten(0, 1)
        return inner @ weight.T + gradients[1], of_weight, None, None


@part
def function_of_two_outputs(draw: Draw) -> Run:
    weight, which = draw.parameter(D, D), draw.one_of(0, 1, None)

    def run(x: Tensor, _: Batch) -> Tensor:
        found = Pair.apply(x.tanh(), weight.here, 2, torch.ones(D).to(x))
        return found[0] + found[1] if which is None else found[which]

    return run


@part
def checkpoints_in_checkpoints(draw: Draw) -> Run:
    one, other, norm = draw.linear(), draw.linear(), draw.add(nn.LayerNorm(D))

    def inner(y: Tensor) -> Tensor:
        return F.dropout(other(y).tanh(), 0.2)

    def outer(y: Tensor) -> Tensor:
        y = one(norm(y))
        found: Tensor = checkpoint(inner, y, use_reentrant=False)
        return found + y.sin()

    return lambda x, _: checkpoint(outer, x, use_reentrant=False)


@part
def ensemble(draw: Draw) -> Run:
    layers = [draw.linear() for _ in range(2)]

    def run(x: Tensor, _: Batch) -> Tensor:
        every = [layer.here for layer in layers]
        stacked = torch.stack([layer.weight for layer in every])
        return torch.vmap(F.linear, in_dims=(None, 0))(x, stacked).tanh().mean(0)

    return run


@part
def slopes_by_row(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, _: Batch) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            return F.linear(row, layer.here.weight).tanh().sum()

        return x + torch.vmap(torch.func.grad(energy))(x)

    return run


@part
def only_if_there_is_such_a_task(draw: Draw) -> Run:
    heads = [draw.linear() for _ in range(2)]

    def run(x: Tensor, batch: Batch) -> Tensor:
        out = 0.5 * x
        for task, head in enumerate(heads, start=1):
            mine = (batch.tasks == task).nonzero()[:, 0]
            if len(mine):
                out = out.index_copy(0, mine, head(x[mine]).tanh())
        return out

    return run


# -- where rows are ------------------------------------------------------------------------------


@part
def rows_second(draw: Draw) -> Run:
    layer, shift = draw.linear(), draw.parameter(S, 1, D)
    return lambda x, _: (layer(x.transpose(0, 1)) + shift.here).tanh().transpose(0, 1)


@part
def rows_last(draw: Draw) -> Run:
    weight, shift = draw.parameter(D, D), draw.parameter(D, 1)

    def run(x: Tensor, _: Batch) -> Tensor:
        columns = x.flatten(0, 1).T
        return (weight.here @ columns + shift.here).T.view(x.shape)

    return run


@part
def rows_twice(draw: Draw) -> Run:
    layer, way = draw.linear(), draw.one_of(0, 1, 2)

    def run(x: Tensor, _: Batch) -> Tensor:
        if way == 0:
            first, second = layer(torch.cat([x, x.sin()])).chunk(2)
            return first * second.tanh()
        if way == 1:
            return layer(x.repeat_interleave(2, 0)).view(-1, 2, S, D).amax(1)
        return layer(x.repeat(2, 1, 1)).view(2, -1, S, D).prod(0)

    return run


@part
def rows_sorted(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, _: Batch) -> Tensor:
        order = x.detach().sum((1, 2)).argsort()
        return layer(x[order]).tanh()[order.argsort()]

    return run


@part
def entries_packed(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, batch: Batch) -> Tensor:
        mask = torch.arange(S) < batch.lengths[:, None]
        return x.masked_scatter(mask[..., None], layer(x[mask]).tanh())

    return run


@part
def routed(draw: Draw) -> Run:
    experts, router = [draw.linear() for _ in range(2)], draw.linear(D, 2)
    by_row = draw.one_of(True, False)

    def run(x: Tensor, _: Batch) -> Tensor:
        flat = x if by_row else x.flatten(0, 1)
        shares = router(flat.mean(1) if by_row else flat).softmax(-1)
        out, chosen = torch.zeros_like(flat), shares.argmax(-1)
        for number, expert in enumerate(experts):
            mine = (chosen == number).nonzero()[:, 0]
            share = shares[mine, number].view(-1, *[1] * (flat.dim() - 1))
            out = out.index_add(0, mine, expert(flat[mine]) * share)
        return x + out.view(x.shape)

    return run


@part
def only_some_rows(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, batch: Batch) -> Tensor:
        y = x.clone()
        mine = batch.tasks > 0
        y[mine] = layer(x[mine])
        return y

    return run


@part
def mixed_by_batch_norm(draw: Draw) -> Run:
    layer = draw.add(nn.BatchNorm1d(D))
    return lambda x, _: layer(x.mT).mT


@part
def mixed_by_the_mean(draw: Draw) -> Run:
    layer = draw.linear()
    return lambda x, _: layer(x - 0.5 * x.mean(0))


@part
def mixed_by_attention_over_rows(draw: Draw) -> Run:
    layer = draw.linear()
    return lambda x, _: ((x.flatten(1) @ x.flatten(1).T).softmax(-1) @ layer(x).flatten(1)).view(
        x.shape
    )


@part
def mixed_by_a_hook_that_begins(draw: Draw) -> Run:
    layer, begin = draw.linear(), draw.random.randint(0, STEPS - 1)

    def run(x: Tensor, batch: Batch) -> Tensor:
        y: Tensor = layer(x)
        if batch.step >= begin:
            y.register_hook(lambda gradient: gradient - gradient.mean(0))
        return y

    return run


@part
def clipped_before_a_parameter(draw: Draw) -> Run:
    weight, begin = draw.parameter(D, D), draw.random.randint(0, STEPS - 1)

    def run(x: Tensor, batch: Batch) -> Tensor:
        halved = 0.5 * weight.here
        if batch.step >= begin:
            halved.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return x @ halved

    return run


@part
def hidden_by_a_reentrant_checkpoint(draw: Draw) -> Run:
    layer = draw.linear()
    return lambda x, _: checkpoint(lambda y: layer(y).tanh(), x, use_reentrant=True)


@part
def nested_rows(draw: Draw) -> Run:
    layer = draw.linear()

    def run(x: Tensor, batch: Batch) -> Tensor:
        rows = [row[:length] for row, length in zip(x, batch.lengths.tolist(), strict=True)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return x + torch.nested.to_padded_tensor(layer(nested), 0.0, (len(x), S, D))

    return run


# -- a model of them, and the attack -------------------------------------------------------------


class Attack:
    """One random model, and how it is trained.

    Args:
        seed: Draws all of it.
        num_steps: For which it is trained.
        num_sizes: Of batches; every step has one of its own by default.
        parts: What it may be made of.

    Attributes:
        parts: Names of what it is made of.
        is_mixing: Its rows influence each other.
    """

    def __init__(
        self,
        seed: int,
        num_steps: int = STEPS,
        num_sizes: int = STEPS,
        parts: Sequence[str] | None = None,
    ) -> None:
        draw = Draw(seed)
        self.seed, choose = seed, draw.random
        usual = [name for name in PARTS if name not in MIXING]
        self.parts = choose.choices(parts or usual, k=choose.randint(3, 8))
        if choose.random() < 0.08:
            self.parts[choose.randrange(len(self.parts))] = choose.choice(MIXING)
        self.is_mixing = any(name in MIXING for name in self.parts)
        self._table = draw.add(nn.Embedding(11, D))
        self._runs = [PARTS[name](draw) for name in self.parts]
        self._from = [choose.randint(max(0, n - 2), n) for n in range(len(self.parts))]
        self._is_tied, self._is_residual = choose.random() < 0.4, choose.random() < 0.6
        self._head = draw.linear(D, 11)
        self.model = draw.model.double()
        for module in self.model.children():
            if isinstance(module, Narrow):
                module.float()
        forms = ["rows", "mapping", "accumulated", "one for each task"]
        self._form = choose.choices(forms, [8, 1, 1, 1])[0]
        self._is_masked, self._skipped = choose.random() < 0.3, choose.choice([0.0, 0.0, 0.3])
        self._granularity = choose.choice(["all_layer", "all_matrix", "whole_model"])
        self._options = choose.choice([{}, {}, {"stream_bytes": 1}, {"table_bytes": 1}])
        if self._form == "rows" and choose.random() < 0.1:
            self._options = {"recompute": True}
        sizes = [choose.randint(4, 9) for _ in range(STEPS)]
        self._sizes = [sizes[step % num_sizes] for step in range(num_steps)]
        self._random = choose

    def _losses(self, tokens: Tensor, batch: Batch) -> Tensor:
        states, draw = [self._table(tokens)], random.Random(batch.step)
        for run, source in zip(self._runs, self._from, strict=True):
            if draw.random() < self._skipped:
                states.append(states[source])
                continue
            y = run(states[source], batch)
            states.append(y + states[source] if self._is_residual else y)
        out = sum(states[1:], 0.3 * states[0])
        assert isinstance(out, Tensor)
        logits = out @ self._table.here.weight.T if self._is_tied else self._head(out)
        losses = F.cross_entropy(logits.mT, tokens.roll(-1, 1), reduction="none")
        if self._is_masked:
            mask = torch.arange(S) < batch.lengths[:, None]
            return (losses * mask).sum(1) / mask.sum()
        return losses.mean(1)

    def run(self, engine: str = "one_backward") -> tuple[str, str]:
        """What came of it, and more about that."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                error = self._train(engine)
            except ValueError as refusal:
                if "engine=" not in str(refusal):
                    return "crash", repr(refusal)
                return ("refused" if self.is_mixing else "needless"), str(refusal)
            except Exception as crash:
                return "crash", f"{type(crash).__name__}: {crash}"
        limits = {"narrow_inside": 5e-2, "two_dtypes": 1e-4}
        limit = max(1e-8, *(limits.get(part, 0.0) for part in self.parts))
        return ("exact" if error < limit else "wrong"), f"largest relative error {error:.1e}"

    def _train(self, engine: str) -> float:
        weights = {task: self._random.uniform(0.3, 3.0) for task in TASKS}
        model, twin = copy.deepcopy(self.model), copy.deepcopy(self.model)
        pairs = [
            # Other rules are sensitive to the rounding of a gradient that is zero.
            (
                model,
                Aligner(model, TASKS, Sum(weights), self._granularity, engine, **self._options),
            ),
            (twin, Aligner(twin, TASKS, Sum(weights), self._granularity, "per_task")),
        ]
        worst = 0.0
        for step, size in enumerate(self._sizes):
            tasks = torch.tensor([self._random.randrange(len(TASKS)) for _ in range(size)])
            if step == 3:
                tasks[tasks == 1] = 2
            lengths = torch.tensor([self._random.randint(1, S) for _ in range(size)])
            tokens = torch.tensor([[self._random.randrange(11) for _ in range(S)] for _ in tasks])
            batch = Batch(tasks, lengths, step)
            for own, aligner in pairs:
                own.zero_grad()
                torch.manual_seed(step)
                TURN[:] = [own]
                self._backward(aligner, tokens, batch)
            worst = max(worst, self._distance(model, twin))
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            for own, _ in pairs:  # the same for both: errors do not add up
                for mine, theirs in zip(own.parameters(), twin.parameters(), strict=True):
                    if theirs.grad is not None:
                        mine.data.sub_(0.1 * theirs.grad.to_dense())
        return worst

    def _backward(self, aligner: Aligner, tokens: Tensor, batch: Batch) -> None:
        losses = self._losses(tokens, batch)
        if self._form == "mapping":
            every = sorted(set(batch.tasks.tolist()))
            aligner.backward({TASKS[t]: losses[batch.tasks == t].sum() for t in every})
            return
        if self._form == "one for each task":
            of_tasks = losses.new_zeros(len(TASKS)).index_add(0, batch.tasks, losses)
            aligner.backward(of_tasks, TASKS)
            return
        if self._form == "accumulated":
            aligner.backward(losses, batch.tasks, accumulate=True)
            losses = self._losses(tokens.flip(1), batch)
        aligner.backward(losses, batch.tasks)

    @staticmethod
    def _distance(model: nn.Module, twin: nn.Module) -> float:
        """The largest relative error; of a parameter's own scale, or a hundredth of the model's."""
        theirs = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        mine = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if mine.keys() != theirs.keys():
            return float("inf")
        scale = 0.01 * torch.stack([g.double().norm() for g in theirs.values()]).norm()
        return max(
            float((mine[n].double() - g.double()).norm() / (g.double().norm() + scale))
            for n, g in theirs.items()
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no more after these")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sizes", type=int, default=STEPS, choices=range(1, STEPS + 1))
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help="of these alone")
    parser.add_argument("--engine", default="one_backward", choices=("one_backward", "auto"))
    parser.add_argument("--verbose", action="store_true", help="show every model")
    args = parser.parse_args()
    start, count = time.perf_counter(), Counter[str]()
    used = Counter[str]()
    for seed in range(args.first, args.first + args.models):
        if time.perf_counter() - start > args.seconds:
            break
        attack = Attack(seed, args.steps, args.sizes, args.parts)
        outcome, more = attack.run(args.engine)
        count[outcome] += 1
        used.update(set(attack.parts))
        if args.verbose or outcome not in ("exact", "refused"):
            print(f"{seed} {outcome}: {' '.join(attack.parts)}\n    {more}", flush=True)
    every = ", ".join(f"{number} {outcome}" for outcome, number in count.most_common())
    seconds = time.perf_counter() - start
    print(f"{count.total()} models of {len(used)} parts: {every} ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
