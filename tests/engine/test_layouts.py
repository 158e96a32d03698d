"""Wherever the rows lie, and whoever uses a parameter: task gradients are exact."""

# B rows, S tokens, D width

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gradvac import GradVac

from .parity import ONE_ABSENT, SORTED, UNSORTED, Twins
from .zoo._case import B, Block, Case, D, HandWrittenNorm, Model, S, V, distance, output, tokens_of

CASES: dict[str, Callable[[], Case]] = {}


def case(factory: Callable[[], Case]) -> Callable[[], Case]:
    CASES[factory.__name__] = factory
    return factory


def linears(run: Callable[..., Any], *shape: int, **parts: nn.Module | nn.Parameter) -> Case:
    """Two linear layers and what is between them, on rows of vectors."""
    model = Model(run, first=nn.Linear(D, D), last=nn.Linear(D, 3), **parts)
    return Case(model, output, (torch.randn(*shape or (B, D)),))


# -- where rows lie ------------------------------------------------------------------------------


def sequence_first(length: int) -> Case:
    return linears(
        lambda m, x: m.last(m.first(x.transpose(0, 1)).tanh()).transpose(0, 1), B, length, D
    )


CASES["sequence_first"] = lambda: sequence_first(S)
CASES["sequence_first_as_long_as_the_batch"] = lambda: sequence_first(B)
CASES["sequence_first_twice_as_long"] = lambda: sequence_first(2 * B)


@case
def a_window_of_all_rows() -> Case:
    """Rows lie along a dimension that was not there before."""
    return linears(lambda m, x: m.last(m.first(x).tanh().unfold(0, B, 1)[0].T))


@case
def sequence_first_attention() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        result: Tensor = m.attention(x, x, x)[0].transpose(0, 1)
        return result

    model = Model(run, attention=nn.MultiheadAttention(D, 2))
    return Case(model, output, (torch.randn(B, S, D),))


@case
def sequence_first_lstm() -> Case:
    model = Model(lambda m, x: m.lstm(x.transpose(0, 1))[0].transpose(0, 1), lstm=nn.LSTM(D, D))
    return Case(model, output, (torch.randn(B, S, D),))


@case
def sequence_first_transformer() -> Case:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")  # torch, of its default
        inner = nn.Transformer(D, 2, 1, 1, 12, dropout=0.0)

    def run(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.inner(x.transpose(0, 1), x.transpose(0, 1)).transpose(0, 1)
        return result

    return Case(Model(run, inner=inner), output, (torch.randn(B, S, D),))


@case
def batch_last() -> Case:
    return linears(lambda m, x: m.last((m.first.weight @ x.T + m.first.bias[:, None]).tanh().T))


@case
def batch_last_and_sorted() -> Case:
    """Columns that are rows, and may move: vectors of the last dimension hold all of them."""

    def run(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        columns = (m.middle.weight @ m.first(x)[order].T + m.middle.bias[:, None]).tanh()
        result: Tensor = m.last(columns.T)[order.argsort()]
        return result

    return linears(run, middle=nn.Linear(D, D))


@case
def rows_repeated() -> Case:
    """Choices and beams: every row several times, together or coming round again."""

    def run(m: Any, x: Tensor) -> Tensor:
        together = m.first(x.repeat_interleave(3, 0)).view(B, -1, D).mean(1)
        tiled = m.middle(together.repeat(2, 1)).view(2, -1, D).sum(0)
        result: Tensor = m.last(tiled)
        return result

    return linears(run, middle=nn.Linear(D, D))


@case
def rows_repeated_raggedly() -> Case:
    """As many copies as the data say."""

    def run(m: Any, x: Tensor) -> Tensor:
        count = (x[:, 0] > 0).long() + 1
        row = torch.arange(len(x)).repeat_interleave(count)
        y = m.middle(m.first(x).repeat_interleave(count, 0))
        result: Tensor = m.last(torch.zeros_like(x).index_add(0, row, y))
        return result

    return linears(run, middle=Block())


@case
def sorted_inside() -> Case:
    """By a key of the data, and back; the first batch is in order already."""

    def run(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        result: Tensor = m.last(m.middle(m.first(x)[order]))[order.argsort()]
        return result

    found = linears(run, middle=Block())
    (x,) = found.inputs
    return Case(found.model, found.losses, (x[x[:, 0].argsort()],))


@case
def sorted_by_a_matrix() -> Case:
    """The same by products with permutation matrices."""

    def run(m: Any, x: Tensor) -> Tensor:
        order = torch.eye(len(x), dtype=x.dtype)[x[:, 0].argsort()]
        result: Tensor = m.last(order.T @ m.middle(order @ m.first(x)))
        return result

    found = linears(run, middle=Block())
    (x,) = found.inputs
    return Case(found.model, found.losses, (x[x[:, 0].argsort()],))


@case
def rotated_by_the_data() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        by = int((x[:, 0] > 0).sum()) - 3
        y = m.middle(torch.roll(m.first(x), by, 0))
        cut = by % len(x)
        result: Tensor = m.last(torch.cat([y[cut:], y[:cut]]))
        return result

    return linears(run, middle=Block())


@case
def sorted_in_python() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        order = sorted(range(len(x)), key=lambda n: float(x[n, 0]))
        parts = m.first(x).unbind()
        y = m.middle(torch.stack([parts[n] for n in order])).unbind()
        result: Tensor = m.last(torch.stack([y[order.index(n)] for n in range(len(x))]))
        return result

    return linears(run, middle=Block())


class _Sorted(torch.autograd.Function):
    """A permutation that autograd's names do not tell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order.argsort())
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][ctx.saved_tensors[0]], None


@case
def sorted_by_a_function_of_its_own() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        y = m.middle(_Sorted.apply(m.first(x), order))
        result: Tensor = m.last(_Sorted.apply(y, order.argsort()))
        return result

    found = linears(run, middle=Block())
    (x,) = found.inputs
    return Case(found.model, found.losses, (x[x[:, 0].argsort()],))


@case
def masked_tokens() -> Case:
    """Only what is not padding goes through the middle."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        real = x[..., 0] > 0
        packed = m.middle(y[real])
        result: Tensor = m.last(y.masked_scatter(real[..., None], packed))
        return result

    return linears(run, B, S, D, middle=Block())


@case
def routed_to_experts() -> Case:
    """Mixture of experts: some get rows of several tasks, one gets none."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.first(x).flatten(0, 1)
        scores = F.softmax(m.router(y), -1)
        weight, choice = scores.topk(2)
        total = torch.zeros_like(y)
        for number, expert in enumerate(m.experts):
            token, slot = torch.where(choice == number)
            total.index_add_(0, token, expert(y[token]) * weight[token, slot, None])
        result: Tensor = m.last(total.view(x.shape))
        return result

    router = nn.Linear(D, 4)
    nn.init.constant_(router.bias[3:], -100.0)
    return linears(
        run, B, S, D, router=router, experts=nn.ModuleList(nn.Linear(D, D) for _ in range(4))
    )


@case
def packed_sequence() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        lengths = torch.tensor([5, 2, 4, 1, 5, 3])[: len(x)]
        packed = pack_padded_sequence(m.first(x), lengths, batch_first=True, enforce_sorted=False)
        result: Tensor = m.last(pad_packed_sequence(m.lstm(packed)[0], batch_first=True)[0])
        return result

    return linears(run, B, S, D, lstm=nn.LSTM(D, D, batch_first=True))


@case
def one_row_at_a_time() -> Case:
    return linears(lambda m, x: torch.stack([m.last(m.first(row).tanh()) for row in x]))


@case
def written_into_a_buffer() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        y, total = m.first(x), torch.zeros_like(x)
        for row in range(len(x)):
            total[-1 - row] = y[row]
        result: Tensor = m.last(total.flip(0))
        return result

    return linears(run)


@case
def strided_and_unfolded() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.first(x).contiguous()
        windows = y.unfold(1, 3, 2).mean(-1)
        again = torch.as_strided(y, (len(y), D), (D, 1))
        result: Tensor = m.last(F.pad(windows, (0, D - windows.shape[1])) + again)
        return result

    return linears(run)


@case
def mapped_over_rows() -> Case:
    return linears(lambda m, x: torch.func.vmap(lambda row: m.last(m.first(row).tanh()))(x))


@case
def two_steps_of_a_sequence() -> Case:
    """Depth by the data, states that go round."""

    def run(m: Any, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(2 + int(x[0, 0] > 0)):
            state = m.cell(m.first(x), state)
        result: Tensor = m.last(state)
        return result

    return linears(run, cell=nn.GRUCell(D, D))


# -- who uses a parameter, and how ---------------------------------------------------------------


@case
def functional_use() -> Case:
    model = Model(
        lambda m, tokens: F.linear(m.block(m.words(tokens)), m.words.weight),
        words=nn.Embedding(V, D),
        block=Block(),
    )
    return Case(model, output, (tokens_of(B, S),))


@case
def borrowed_and_handed_over() -> Case:
    """A module passed as an argument, and a tensor set as an attribute."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(D))
            self.__dict__["shift"] = None

        def forward(self, x: Tensor, words: nn.Embedding) -> Tensor:
            return F.linear(x * self.scale + self.shift, words.weight)

    def run(m: Any, tokens: Tensor) -> Tensor:
        x = m.block(m.words(tokens))
        m.head.__dict__["shift"] = x.mean(1, keepdim=True)
        result: Tensor = m.head(x, m.words)
        m.head.__dict__["shift"] = None
        return result

    model = Model(run, words=nn.Embedding(V, D), block=Block(), head=Head())
    return Case(model, output, (tokens_of(B, S),))


@case
def low_rank_adapters() -> Case:
    """LoRA, and DoRA, whose scale is a function of the weight and both factors."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(D, D).requires_grad_(False)
            self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
            self.magnitude = nn.Parameter(torch.rand(D) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.base.weight + self.up.weight @ self.down.weight
            scale = self.magnitude / weight.norm(dim=1).detach()
            low: Tensor = self.up(self.down(x))
            return scale * (self.base(x) + low) + (self.magnitude / weight.norm(dim=1)) * low

    return linears(lambda m, x: m.last(m.adapted(m.first(x))), B, S, D, adapted=Adapted())


@case
def positions_without_batch() -> Case:
    model = Model(
        lambda m, tokens: m.block(m.words(tokens) + m.positions(torch.arange(tokens.shape[1]))),
        words=nn.Embedding(V, D),
        positions=nn.Embedding(S, D),
        block=Block(),
    )
    return Case(model, output, (tokens_of(B, S),))


@case
def as_many_positions_as_rows() -> Case:
    model = Model(
        lambda m, tokens: m.block(m.words(tokens) + m.positions(torch.arange(tokens.shape[1]))),
        words=nn.Embedding(V, D),
        positions=nn.Embedding(B, D),
        block=Block(),
    )
    return Case(model, output, (tokens_of(B, B),))


@case
def hypernetwork() -> Case:
    """A weight that is the output of a layer, of nothing but parameters."""

    def run(m: Any, x: Tensor) -> Tensor:
        weight = m.maker(m.code).view(D, D)
        result: Tensor = m.last(F.linear(m.first(x), weight))
        return result

    return linears(run, maker=nn.Linear(3, D * D), code=nn.Parameter(torch.randn(3)))


@case
def scalars() -> Case:
    """Temperature, ReZero, a parameter without dimensions in every place."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.first(x) / m.temperature.exp()
        y = y + m.gate * y.tanh()
        result: Tensor = m.last(y ** m.power.sigmoid()) if False else m.last(y - m.power)
        return result

    def number(value: float) -> nn.Parameter:
        return nn.Parameter(torch.tensor(value))

    return linears(run, temperature=number(0.3), gate=number(0.0), power=number(0.2))


@case
def in_batch_negatives_of_another_pass() -> Case:
    """Each row meets all rows of a second pass: T gradients go through that one."""

    def losses(model: Any, tasks: Tensor, x: Tensor) -> Tensor:
        scores = model(x) @ model(x.flip(1)).T
        return F.cross_entropy(scores, torch.arange(len(x)), reduction="none")

    return Case(
        nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), losses, (torch.randn(B, D),)
    )


@case
def writes_to_its_input() -> Case:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor) -> Tensor:
            return x.clamp_(-1, 1) * self.weight

    return Case(nn.Sequential(nn.Linear(D, D), Clip()), output, (torch.randn(B, S, D),))


@case
def object_of_its_own() -> Case:
    class State:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor) -> State:
            return State(x * self.weight)

    return linears(lambda m, x: m.last(m.scale(m.first(x)).value), scale=Scale())


@case
def condition_of_all_rows() -> Case:
    """A vector [1, D] for the whole batch, which may meet any dimension of [B, S, D]."""

    def run(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.last(m.first(x) + m.middle(torch.ones(1, D, dtype=x.dtype)))
        return result

    return linears(run, B, B, D, middle=nn.Linear(D, D))


@case
def sequence_of_one() -> Case:
    """Inputs [1, B, D], sequence first."""
    return linears(lambda m, x: m.last(m.first(x[None]).tanh())[0])


@case
def saved_tensors_on_the_host() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            result: Tensor = m.last(m.norm(m.first(x)).tanh())
        return result

    return linears(run, B, S, D, norm=HandWrittenNorm())


@case
def losses_of_few_rows() -> Case:
    """Most rows have no loss."""

    def losses(model: nn.Module, tasks: Tensor, x: Tensor) -> Tensor:
        return distance(model(x)) * (torch.arange(len(x)) < 2)

    return Case(nn.Sequential(nn.Linear(D, D), Block()), losses, (torch.randn(B, D),))


@case
def several_losses_of_a_row() -> Case:
    """Entries of `losses` are tokens; rows of the batch hold several of one task."""

    def losses(model: nn.Module, tasks: Tensor, x: Tensor) -> Tensor:
        y = model(x)
        return distance(y) + y.abs().sum(1).flatten(1).mean(1) + y.flatten(1).amax(1)

    return Case(nn.Sequential(nn.Linear(D, D), Block()), losses, (torch.randn(B, S, D),))


@case
def adaptive_softmax() -> Case:
    def losses(model: Any, tasks: Tensor, tokens: Tensor) -> Tensor:
        hidden = model.block(model.words(tokens)).flatten(0, 1)
        found: Tensor = -model.softmax(hidden, tokens.flatten()).output
        return found.view(len(tokens), -1).mean(1)

    model = Model(
        lambda _, x: x,
        words=nn.Embedding(V, D),
        block=Block(),
        softmax=nn.AdaptiveLogSoftmaxWithLoss(D, V, [3, 6], div_value=2.0),
    )
    return Case(model, losses, (tokens_of(B, S),))


@case
def complex_weights() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.wave(torch.complex(m.first(x), x)) * m.phase
        result: Tensor = m.last(y.abs() + y.real)
        return result

    return linears(
        run,
        wave=nn.Linear(D, D, dtype=torch.complex128),
        phase=nn.Parameter(torch.randn(D, dtype=torch.complex128)),
    )


@case
def complex_weights_of_sorted_rows() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        y = m.wave(torch.complex(m.first(x), x)[order]) * m.phase
        result: Tensor = m.last(y.real[order.argsort()])
        return result

    return linears(
        run,
        wave=nn.Linear(D, D, dtype=torch.complex128),
        phase=nn.Parameter(torch.randn(D, dtype=torch.complex128)),
    )


def doubled(name: str) -> Case:
    torch.manual_seed(len(name))
    found = CASES[name]()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in found.inputs)
    return Case(found.model.double(), found.losses, inputs)


@pytest.mark.parametrize("name", CASES)
def test_equals_per_task(name: str) -> None:
    """The first batches alike; then others in the same form, at steps without a probe."""
    case = doubled(name)
    twins = Twins(case, lambda: GradVac(beta=0.3))
    generator = torch.Generator().manual_seed(1)
    for number, tasks in enumerate((UNSORTED, ONE_ABSENT, SORTED, UNSORTED)):
        if number > 1:
            order = torch.randperm(len(tasks), generator=generator)
            inputs = tuple(x[order] for x in case.inputs)
            twins.case = Case(case.model, case.losses, inputs)
        twins.step(tasks)


@pytest.mark.parametrize("name", ["sorted_inside", "routed_to_experts", "rows_repeated"])
def test_second_backward_instead_of_storing(name: str) -> None:
    case = doubled(name)
    twins = Twins(case, lambda: GradVac(beta=0.3), granularity="whole_model", recompute=True)
    for tasks in (UNSORTED, ONE_ABSENT):
        twins.step(tasks)


def test_a_small_task_beside_a_large_one() -> None:
    """A weight that is put together has as many rows as the batch, and looks like the batch."""

    def losses(model: nn.Module, tasks: Tensor, x: Tensor) -> Tensor:
        sizes = torch.tensor([1e-12, 1.0, 1.0], dtype=torch.float64)
        return sizes[tasks] * distance(model(x))

    def run(m: Any, x: Tensor) -> Tensor:
        result: Tensor = x[:, :B] @ torch.cat([m.upper, m.lower])
        return result

    upper, lower = (nn.Parameter(torch.randn(rows, D)) for rows in (2, B - 2))
    model = Model(run, upper=upper, lower=lower).double()
    case = Case(model, losses, (torch.randn(B, D, dtype=torch.float64),))
    Twins(case, lambda: GradVac(target=0.9)).step([0, 1, 0, 0, 1, 1])


def padded(m: Any, x: Tensor) -> Tensor:
    """A padding that names the rows' dimension, and adds nothing to it."""
    result: Tensor = m.last(F.pad(m.first(x), (1, -1, 2, 0, 0, 0)).tanh())
    return result


def patches(m: Any, x: Tensor) -> Tensor:
    """[B, 1, S, D] -> [B, 2 * 2, L]."""
    found = F.unfold(m.first(x)[:, None], (2, 2), padding=1, stride=2)
    result: Tensor = m.last(F.pad(found, (0, D - found.shape[2])))
    return result


def patches_of_one_entry(m: Any, x: Tensor) -> Tensor:
    """Rows are the channels of one image: [B, S, D] -> [B, S * D]."""
    result: Tensor = m.last(F.unfold(m.first(x), (1, 1)).view(B, S, D))
    return result


@pytest.mark.parametrize("run", [padded, patches, patches_of_one_entry])
def test_rows_that_are_left_alone_are_not_measured(run: Callable[..., Tensor]) -> None:
    made = linears(run, B, S, D)
    made = Case(made.model.double(), made.losses, tuple(x.double() for x in made.inputs))
    twins = Twins(made, lambda: GradVac(beta=0.3))
    for tasks in (UNSORTED, SORTED, ONE_ABSENT):
        twins.step(tasks)
    assert "measured" not in repr(twins.aligner)


def test_channels_of_one_image_are_measured() -> None:
    """Patches of several entries bring several channels, which are the rows, for each."""

    def run(m: Any, x: Tensor) -> Tensor:
        found = F.unfold(m.first(x), (1, 2), stride=(1, 2))  # [B * 2, S * D / 2]
        result: Tensor = m.last(found.view(B, 2, S, -1).transpose(1, 2).flatten(2))
        return result

    made = linears(run, B, S, D)
    made = Case(made.model.double(), made.losses, tuple(x.double() for x in made.inputs))
    twins = Twins(made, lambda: GradVac(beta=0.3))
    for tasks in (UNSORTED, SORTED, ONE_ABSENT):
        twins.step(tasks)
    assert "measured" in repr(twins.aligner)


OF_MATRICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "solve": lambda square, x: torch.linalg.solve(square, x),
    "inverse": lambda square, x: torch.linalg.inv(square) @ x,
    "cholesky": lambda square, x: torch.linalg.cholesky(square) @ x,
    "triangular": lambda square, x: torch.linalg.solve_triangular(square.tril(), x, upper=False),
    "by a factor": lambda square, x: torch.cholesky_solve(x, square.tril()),
    "exponential": lambda square, x: torch.linalg.matrix_exp(-square) @ x,
    "distances": lambda square, x: torch.cdist(x, square),
}


@pytest.mark.parametrize("name", OF_MATRICES)
def test_rows_are_followed_through_operations_on_matrices(name: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        square = y.mT @ y + 5 * torch.eye(D, dtype=y.dtype)
        result: Tensor = m.last(OF_MATRICES[name](square, m.first(x.sin()).mT).mT)
        return result

    made = linears(run, B, D, D)
    made = Case(made.model.double(), made.losses, tuple(x.double() for x in made.inputs))
    twins = Twins(made, lambda: GradVac(target=0.5))
    for tasks in (UNSORTED, SORTED):
        twins.step(tasks)
    assert "measured" not in repr(twins.aligner)
