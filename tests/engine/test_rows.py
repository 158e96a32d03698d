"""Whose rows are whose: packed batches, and the ways to name tasks."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradvac
from gradvac import Aligner, GradVac

from .parity import TASKS, UNSORTED, assert_same_gradients, attach, gradients_of, made
from .zoo import Case
from .zoo._case import B, Block, D, Model, S, distance
from .zoo.sequences import CrossAttention

ROWS = torch.tensor(UNSORTED)
COUNTS = torch.tensor([2, 1, 3, 2, 1, 2])
TOKENS = ROWS.repeat_interleave(COUNTS)  # 11 tokens of 6 sentences


def rule() -> GradVac:
    return GradVac(beta=0.3)


def packed_losses(model: nn.Module, x: Tensor) -> Tensor:
    """One loss per token."""
    return distance(model(x))


def reference(model: nn.Module, losses: Tensor, tasks: Any) -> dict[str, Tensor]:
    """What per_task makes of losses, with the model left as it was."""
    model.zero_grad()
    Aligner(model, TASKS, rule(), engine="per_task").backward(losses, tasks)
    found = gradients_of(model)
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["names", "positions", "tensor", "int32", "reused"])
def test_ways_to_name_tasks(kind: str) -> None:
    model = Block().double()
    x = torch.randn(B, S, D, dtype=torch.float64)
    expected = reference(model, distance(model(x)), ROWS)
    aligner = attach(model, rule())
    given: Any = {
        "names": [TASKS[t] for t in UNSORTED],
        "positions": UNSORTED,
        "tensor": ROWS,
        "int32": ROWS.to(torch.int32),
        "reused": ROWS.expand(1, -1)[0],
    }[kind]
    aligner.backward(distance(model(x)), given)
    torch.testing.assert_close(gradients_of(model), expected)


def test_tasks_given_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on a device is not looked at: all tasks are present, absent ones have norm 0."""
    model = Block().double()
    x = torch.randn(B, S, D, dtype=torch.float64)
    tasks = torch.tensor([2, 1, 1, 2, 2, 1])
    expected = reference(model, distance(model(x)), tasks)
    aligner = attach(model, rule())
    index = torch.tensor([2, 0, 0, 2, 2, 0])  # positions in "a", "b", "c"
    everyone = gradvac.engine.Losses((1, 0, 2), (distance(model(x)),), index)
    monkeypatch.setattr("gradvac.aligner.read_losses", lambda *_: everyone)
    alignment = aligner.backward(everyone.roots[0], tasks)
    assert alignment.tasks == tuple(TASKS)
    assert not alignment.norms[:, 0].any()
    torch.testing.assert_close(gradients_of(model), expected)


def test_packed_rows() -> None:
    model = Block().double()
    x = torch.randn(len(TOKENS), D, dtype=torch.float64)
    expected = reference(model, distance(model(x)), TOKENS)
    aligner = attach(model, rule())
    with gradvac.rows(TOKENS):
        per_token = distance(model(x))
    sentence = torch.arange(B).repeat_interleave(COUNTS)
    aligner.backward(torch.zeros(B).double().index_add(0, sentence, per_token), ROWS)
    torch.testing.assert_close(gradients_of(model), expected)


def test_rows_by_name() -> None:
    model = Block().double()
    x = torch.randn(len(TOKENS), D, dtype=torch.float64)
    expected = reference(model, distance(model(x)), TOKENS)
    aligner = attach(model, rule())
    with gradvac.rows([TASKS[t] for t in TOKENS]):
        losses = distance(model(x))
    aligner.backward({task: losses[t == TOKENS].sum() for t, task in enumerate(TASKS)})
    torch.testing.assert_close(gradients_of(model), expected)


def test_rows_said_to_ascend() -> None:
    """Nothing is sorted then, so what is not true of them is refused."""
    model = Block().double()
    x = torch.randn(len(TOKENS), D, dtype=torch.float64)
    tasks = TOKENS.sort().values
    expected = reference(model, packed_losses(model, x), tasks)
    aligner = attach(model, rule())
    with gradvac.rows(gradvac.RowTasks(tasks, ascending=True)):
        losses = packed_losses(model, x)
    aligner.backward(losses, tasks)
    torch.testing.assert_close(gradients_of(model), expected)
    with gradvac.rows(gradvac.RowTasks(tasks.flip(0), ascending=True)):
        losses = packed_losses(model, x)
    with pytest.raises(ValueError, match="leave out ascending=True"):
        aligner.backward(losses, tasks.flip(0))


def test_mapping_of_one_forward() -> None:
    """Each row serves one task: measured, no rows need to be named."""
    model = Block().double()
    x = torch.randn(B, S, D, dtype=torch.float64)
    expected = reference(model, distance(model(x)), ROWS)
    for engine in ("one_backward", "auto"):
        model.zero_grad()
        aligner = attach(model, rule(), engine=engine)
        losses = distance(model(x))
        aligner.backward({task: losses[t == ROWS].sum() for t, task in enumerate(TASKS)})
        torch.testing.assert_close(gradients_of(model), expected)
        assert aligner.engine == "one_backward"
        assert "measured every step" in repr(aligner)


def test_mapping_whose_rows_serve_several_tasks() -> None:
    model = Block().double()
    x = torch.randn(B, S, D, dtype=torch.float64)

    def losses() -> dict[str, Tensor]:
        y = model(x)
        return {task: y[..., t:].square().sum() for t, task in enumerate(TASKS)}

    Aligner(model, TASKS, rule(), engine="per_task").backward(losses())
    expected = gradients_of(model)
    model.zero_grad()
    with pytest.raises(ValueError, match=r"several tasks.*norm\.weight.*per_task"):
        attach(model, rule()).backward(losses())
    assert all(p.grad is None for p in model.parameters())
    aligner = attach(model, rule(), engine="auto")
    with pytest.warns(UserWarning, match="continues with per_task"):
        aligner.backward(losses())
    torch.testing.assert_close(gradients_of(model), expected)
    assert aligner.engine == "per_task"


def test_innermost_wins() -> None:
    """Keys and values follow the source, although they run inside the target's context."""
    model = Model(lambda m, *a: m.attention(*a), attention=CrossAttention()).double()
    source = ROWS.repeat_interleave(torch.tensor([1, 2, 1, 3, 1, 1]))
    x = torch.randn(len(TOKENS), D, dtype=torch.float64)
    y = torch.randn(len(source), D, dtype=torch.float64)
    same = TOKENS[:, None] == source
    expected = reference(model, distance(model(x, y, same, source)), TOKENS)
    aligner = attach(model, rule())
    with gradvac.rows(TOKENS):
        losses = distance(model(x, y, same, source))
    aligner.backward(losses, TOKENS)
    torch.testing.assert_close(gradients_of(model), expected)


def test_outer_rows_are_back_after_the_inner() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)).double()
    x = torch.randn(len(TOKENS), D, dtype=torch.float64)
    expected = reference(model, distance(model(x)), TOKENS)
    aligner = attach(model, rule())
    with gradvac.rows(TOKENS):
        with gradvac.rows(["c"]), torch.no_grad():
            model[0](x[:1])
        losses = distance(model(x))
    aligner.backward(losses, TOKENS)
    torch.testing.assert_close(gradients_of(model), expected)


def test_a_block_without_rows() -> None:
    """Notes beside the tokens of a batch, of which some batches have none."""
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)]).double()
    engines = [Aligner(model, TASKS, rule(), engine="per_task"), attach(model, rule())]

    def losses(num_notes: int) -> Tensor:
        x = torch.randn(len(TOKENS), D, generator=torch.Generator().manual_seed(3)).double()
        with gradvac.rows(TOKENS):
            y = model[0](x)
        with gradvac.rows(TOKENS[:num_notes].tolist()):
            notes = model[1](x[:num_notes]).tanh()
        return distance(y + torch.cat([notes, x[num_notes:]]))

    for num_notes in (0, 0, 3, 0, 5):
        found = []
        for aligner in engines:
            aligner.backward(losses(num_notes), TOKENS)
            found.append(gradients_of(model))
            model.zero_grad()
        torch.testing.assert_close(found[1], found[0])


def test_a_block_with_rows_along_another_dimension() -> None:
    """Whose they are is measured there."""

    def run(m: Any, x: Tensor) -> Any:
        return m.block((torch.stack([x, x.sin()]) * m.scale).sum(0))

    model = Model(run, scale=nn.Parameter(torch.randn(D)), block=Block()).double()
    x = torch.randn(len(TOKENS), D, dtype=torch.float64)
    expected = reference(model, packed_losses(model, x), TOKENS)
    aligner = attach(model, rule())
    with gradvac.rows(TOKENS):
        losses = packed_losses(model, x)
    aligner.backward(losses, TOKENS)
    torch.testing.assert_close(gradients_of(model), expected)
    assert "declared" in repr(aligner)
    assert "measured every step (1 of" in repr(aligner)


def test_rows_of_a_task_without_loss() -> None:
    model = Block()
    aligner = attach(model)
    with gradvac.rows(TOKENS):
        losses = distance(model(torch.randn(len(TOKENS), D)))
    with pytest.raises(ValueError, match="rows: names a task that has no loss"):
        aligner.backward(losses[TOKENS != 0], TOKENS[TOKENS != 0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_rows_around_a_checkpoint(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(D, D), Block()).double()
    x = torch.randn(len(TOKENS), D, dtype=torch.float64)
    expected = reference(model, distance(model(x)), TOKENS)
    aligner = attach(model, rule())
    with gradvac.rows(TOKENS):
        losses = distance(checkpoint(model[1], model[0](x), use_reentrant=use_reentrant))
    if use_reentrant:
        with pytest.raises(ValueError, match="use_reentrant=False"):
            aligner.backward(losses, TOKENS)
    else:
        aligner.backward(losses, TOKENS)
        torch.testing.assert_close(gradients_of(model), expected)


def test_rows_without_an_aligner() -> None:
    model = Block()
    x = torch.randn(B, D)
    with gradvac.rows(["no", "such", "task"]):
        found = model(x)
    assert torch.equal(found, model(x))


def test_frames_folded_into_the_batch() -> None:
    """Convolutions over [B * frames, C, L]: several entries a row."""

    def run(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.norm(m.second(m.first(x.flatten(0, 1)))).view(len(x), -1)
        return result

    model = Model(
        run,
        first=nn.Conv1d(2, 4, 3),
        second=nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"),
        norm=nn.GroupNorm(2, 4),
    )
    case = Case(model.double(), made("nested").losses, (torch.randn(B, 3, 2, 7).double(),))
    plain = reference(model, case.losses(model, ROWS, *case.inputs), ROWS)
    aligner = attach(model, rule())
    aligner.backward(case.losses(model, ROWS, *case.inputs), ROWS)
    torch.testing.assert_close(gradients_of(model), plain)


def test_same_layout_again_and_another_one() -> None:
    """The layout of the last batch is remembered."""
    twin, model = Block().double(), Block().double()
    model.load_state_dict(twin.state_dict())
    per_task = Aligner(twin, TASKS, rule(), engine="per_task")
    aligner = attach(model, rule())
    x = torch.randn(B, S, D, dtype=torch.float64)
    for tasks in (UNSORTED, UNSORTED, [0, 0, 0, 1, 2, 2], [1, 1, 0, 0, 0, 1], UNSORTED):
        per_task.backward(distance(twin(x)), tasks)
        aligner.backward(distance(model(x)), tasks)
        assert_same_gradients(model, twin, 1e-9)


def test_rows_that_only_some_forwards_declare() -> None:
    """The same graph, with and without: what was declared in one is not taken for so in another."""
    model = Model(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    twin = copy.deepcopy(model)
    aligner, reference = attach(model), Aligner(twin, TASKS, engine="per_task")
    for step in range(9):
        x = torch.randn(B, D, dtype=torch.float64)
        with gradvac.rows(torch.tensor(UNSORTED)) if step % 3 == 1 else nullcontext():
            losses = distance(model(x))
        for own, by, given in ((model, aligner, losses), (twin, reference, distance(twin(x)))):
            own.zero_grad()
            by.backward(given, UNSORTED)
        assert_same_gradients(model, twin, 1e-9)
