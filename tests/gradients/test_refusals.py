"""What one_backward cannot be right for: refused by name, and taken over by per_task in "auto"."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from gradvac import Aligner, GradVac

from .parity import TASKS, UNSORTED, assert_same_gradients, attach, plain_backward
from .zoo._case import B, Block, Case, D, HandWrittenNorm, Model, S, V, distance, output, tokens_of

ROWS = torch.tensor(UNSORTED)


def sequence_first(length: int) -> Case:
    """Activations [S, B, D] between layers, back to [B, S, D] at the end."""
    model = Model(
        lambda m, x: m.last(m.first(x.transpose(0, 1)).tanh()).transpose(0, 1),
        first=nn.Linear(D, D),
        last=nn.Linear(D, 3),
    )
    return Case(model, output, (torch.randn(B, length, D),))


def batch_norm() -> Case:
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 3))
    return Case(model, output, (torch.randn(B, D),))


def attention() -> Case:
    model = Model(
        lambda m, x: m.attention(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[
            0
        ].transpose(0, 1),
        attention=nn.MultiheadAttention(D, 2),
    )
    return Case(model, output, (torch.randn(B, S, D),))


def lstm() -> Case:
    model = Model(lambda m, x: m.lstm(x.transpose(0, 1))[0].transpose(0, 1), lstm=nn.LSTM(D, D))
    return Case(model, output, (torch.randn(B, S, D),))


def transformer() -> Case:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")  # torch, of its default
        inner = nn.Transformer(D, 2, 1, 1, 12, dropout=0.0)
    model = Model(
        lambda m, x: m.inner(x.transpose(0, 1), x.transpose(0, 1)).transpose(0, 1), inner=inner
    )
    return Case(model, output, (torch.randn(B, S, D),))


def in_batch_negatives() -> Case:
    def losses(model: nn.Module, tasks: Tensor, x: Tensor, y: Tensor) -> Tensor:
        scores = model(x) @ model(y).T
        return F.cross_entropy(scores, torch.arange(len(x)), reduction="none")

    return Case(nn.Linear(D, 3), losses, (torch.randn(B, D), torch.randn(B, D)))


def mean_over_the_batch() -> Case:
    """A hand-written normalisation over dimension 0."""
    model = Model(
        lambda m, x: m.last(m.first(x) - m.first(x).mean(0)),
        first=nn.Linear(D, D),
        last=nn.Linear(D, 3),
    )
    return Case(model, output, (torch.randn(B, D),))


def functional_use() -> Case:
    model = Model(
        lambda m, tokens: F.linear(m.block(m.words(tokens)), m.words.weight),
        words=nn.Embedding(V, D),
        block=Block(),
    )
    return Case(model, output, (tokens_of(B, S),))


def positions_without_batch() -> Case:
    model = Model(
        lambda m, tokens: m.block(m.words(tokens) + m.positions(torch.arange(tokens.shape[1]))),
        words=nn.Embedding(V, D),
        positions=nn.Embedding(S, D),
        block=Block(),
    )
    return Case(model, output, (tokens_of(B, S),))


def parameter_as_a_module() -> Case:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.randn(S, D))

        def forward(self) -> Tensor:
            return self.value * 2

    model = Model(lambda m, x: m.block(x + m.shift()), shift=Shift(), block=Block())
    return Case(model, output, (torch.randn(B, S, D),))


def packed_sequence() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        lengths = torch.tensor([5, 2, 4, 1, 5, 3])
        packed = pack_padded_sequence(m.first(x), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(m.lstm(packed)[0], batch_first=True)[0]

    model = Model(run, first=nn.Linear(D, D), lstm=nn.LSTM(D, D, batch_first=True))
    return Case(model, output, (torch.randn(B, S, D),))


def output_without_rows() -> Case:
    """A module that runs task by task returns something summed over the batch."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * self.weight
            return y, y.square().sum()

    def losses(model: Any, tasks: Tensor, x: Tensor) -> Tensor:
        y, penalty = model.pooled(model.first(x))
        result: Tensor = distance(y) + penalty / len(x)
        return result

    model = Model(lambda m, x: m.pooled(x), first=nn.Linear(D, D), pooled=Pooled())
    return Case(model, losses, (torch.randn(B, S, D),))


def writes_to_its_input() -> Case:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor) -> Tensor:
            return x.clamp_(-1, 1) * self.weight

    model = nn.Sequential(nn.Linear(D, D), Clip())
    return Case(model, output, (torch.randn(B, S, D),))


def object_of_its_own() -> Case:
    """Tensors in an object that autograd's tree of arguments does not know."""

    class State:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor) -> State:
            return State(x * self.weight)

    model = Model(lambda m, x: m.scale(m.first(x)).value, first=nn.Linear(D, D), scale=Scale())
    return Case(model, output, (torch.randn(B, S, D),))


def condition_of_all_rows() -> Case:
    """A vector [1, D] for the whole batch, which may meet any dimension of [B, S, D]."""
    model = Model(
        lambda m, x: m.first(x) + m.second(torch.ones(1, D)),
        first=nn.Linear(D, D),
        second=nn.Linear(D, D),
    )
    return Case(model, output, (torch.randn(B, B, D),))


# The case, and what a message must say: who it is, and what to do.
REFUSED_AT_ONCE: dict[str, tuple[Callable[[], Case], str]] = {
    "batch norm": (batch_norm, r"1 \(BatchNorm1d in training mode\).*per_task.*eval mode"),
    "attention": (attention, r"attention \(MultiheadAttention\).*batch_first=True.*per_task"),
    "lstm": (lstm, r"lstm \(LSTM\).*batch_first=True.*per_task"),
    "transformer": (transformer, r"inner\.encoder.*batch_first=True.*per_task"),
}
REFUSED_BY_THE_CHECK: dict[str, tuple[Callable[[], Case], str]] = {
    "in-batch negatives": (in_batch_negatives, r"weight.*in-batch negatives.*per_task"),
    "mean over the batch": (mean_over_the_batch, r"first\.weight.*layer over the whole batch"),
    "functional use": (functional_use, r"words\.weight is used outside.*tied nn\.Linear.*per_task"),
    "sequence first": (lambda: sequence_first(S), r"(first|last) received dimension 0 of size 5"),
    "sequence first, as long": (lambda: sequence_first(B), r"first.*not dimension 0"),
    "sequence first, twice": (lambda: sequence_first(2 * B), r"first.*not dimension 0"),
    "positions": (positions_without_batch, r"positions received dimension 0 of size 5.*per_task"),
    "parameter": (parameter_as_a_module, r"shift received dimension 0 of size 5.*per_task"),
    "packed sequence": (packed_sequence, r"lstm \(LSTM\) takes.*PackedSequence.*per_task"),
    "writes to its input": (writes_to_its_input, r"1 \(Clip\) writes to its input.*per_task"),
    "object": (object_of_its_own, r"scale \(Scale\).*returns a State.*per_task"),
    "condition": (condition_of_all_rows, r"second received dimension 0 of size 1.*per_task"),
    "output without rows": (output_without_rows, r"pooled received dimension 0 of size 1"),
}


def losses_of(case: Case, model: nn.Module) -> Tensor:
    return case.losses(model, ROWS, *case.inputs)


@pytest.mark.parametrize("kind", REFUSED_AT_ONCE)
def test_refused_when_the_aligner_is_made(kind: str) -> None:
    factory, message = REFUSED_AT_ONCE[kind]
    with pytest.raises(ValueError, match=message):
        attach(factory().model)


@pytest.mark.parametrize("kind", REFUSED_BY_THE_CHECK)
def test_refused_by_the_first_step(kind: str) -> None:
    factory, message = REFUSED_BY_THE_CHECK[kind]
    case = factory()
    aligner = attach(case.model)
    with pytest.raises(ValueError, match=message):
        aligner.backward(losses_of(case, case.model), ROWS)
    assert all(p.grad is None for p in case.model.parameters())


@pytest.mark.parametrize("kind", [*REFUSED_AT_ONCE, *REFUSED_BY_THE_CHECK])
def test_auto_continues_with_per_task(kind: str) -> None:
    factory, _ = {**REFUSED_AT_ONCE, **REFUSED_BY_THE_CHECK}[kind]
    torch.manual_seed(0)
    case = factory()
    reference = copy.deepcopy(case.model)
    expected = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        aligner = Aligner(case.model, TASKS, GradVac(beta=0.3), engine="auto")
        for _ in range(2):
            aligner.backward(losses_of(case, case.model), ROWS)
            expected.backward(losses_of(case, reference), ROWS)
            assert_same_gradients(case.model, reference, 1e-6)
    said = [str(w.message) for w in caught if "continues with per_task" in str(w.message)]
    assert len(said) == 1
    assert "per_task" in repr(aligner)


def test_batch_norm_set_to_training_later() -> None:
    case = batch_norm()
    aligner = attach(case.model.eval())
    aligner.backward(losses_of(case, case.model), ROWS)
    case.model.train()
    plain = copy.deepcopy(case.model)
    plain.zero_grad()
    plain_backward(losses_of(case, plain))
    case.model.zero_grad()
    plain_backward(losses_of(case, case.model))  # plain training goes on
    assert_same_gradients(case.model, plain, 1e-6)
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d in training mode\)"):
        aligner.backward(losses_of(case, case.model), ROWS)
    case.model.eval()
    aligner.backward(losses_of(case, case.model), ROWS)  # the fix of the message fixes it


def test_batch_norm_set_to_training_later_in_auto() -> None:
    case = batch_norm()
    case.model.eval()
    reference = copy.deepcopy(case.model)
    aligner = attach(case.model, GradVac(), engine="auto")
    expected = Aligner(reference, TASKS, GradVac(), engine="per_task")
    for model in (case.model, reference):
        model.train()
    with pytest.warns(UserWarning, match="continues with per_task. 1 .BatchNorm1d"):
        aligner.backward(losses_of(case, case.model), ROWS)
    expected.backward(losses_of(case, reference), ROWS)
    assert_same_gradients(case.model, reference, 1e-6)


def test_reentrant_checkpoint_inside_a_module_without_fast_path() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(m.block, x * m.scale, use_reentrant=True)
        return result

    model = Model(run, scale=nn.Parameter(torch.randn(D)), block=Block())
    aligner = attach(model)
    with pytest.raises(ValueError, match=r"the model runs task by task.*use_reentrant=False"):
        aligner.backward(distance(model(torch.randn(B, S, D))), ROWS)


def test_a_single_task_does_not_count_as_checked() -> None:
    """With one task in the batch every division by rows is right."""
    case = mean_over_the_batch()
    aligner = attach(case.model)
    for _ in range(2):
        aligner.backward(losses_of(case, case.model), [1] * B)
    with pytest.raises(ValueError, match="differ from plain autograd"):
        aligner.backward(losses_of(case, case.model), ROWS)


def test_a_module_is_checked_when_it_first_runs() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.later, self.use = nn.Linear(D, D), nn.Linear(D, D), False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.always(x)
            return self.later(y - y.mean(0)) if self.use else y

    model = Late()
    aligner = attach(model)
    x = torch.randn(B, D)
    aligner.backward(distance(model(x)), ROWS)
    model.use = True
    with pytest.raises(ValueError, match=r"always\.weight"):
        aligner.backward(distance(model(x)), ROWS)


def test_the_check_can_be_left_out() -> None:
    case = mean_over_the_batch()
    aligner = attach(case.model, check=False)
    aligner.backward(losses_of(case, case.model), ROWS)
    assert case.model.get_parameter("first.weight").grad is not None


def test_unfrozen_later() -> None:
    model = Block()
    model.up.weight.requires_grad_(False)
    aligner = attach(model)
    model.up.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="up has a parameter that became trainable"):
        aligner.backward(distance(model(torch.randn(B, D))), ROWS)


def test_frozen_later() -> None:
    model = Block(HandWrittenNorm())
    aligner = attach(model)
    model.up.weight.requires_grad_(False)
    aligner.backward(distance(model(torch.randn(B, D))), ROWS)
    assert model.up.weight.grad is None
    assert model.up.bias.grad is not None


def test_slower_modules_are_announced_once() -> None:
    model = nn.Sequential(Block(HandWrittenNorm()), nn.PReLU(D))
    with pytest.warns(UserWarning, match=r"2 module\(s\).*0\.norm \(HandWrittenNorm\), 1 \(PReLU"):
        aligner = Aligner(model, TASKS, engine="one_backward")
    aligner.backward(distance(model(torch.randn(B, D))), ROWS)  # and not again
