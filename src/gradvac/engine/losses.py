"""What the caller of `backward` gave: losses and their tasks, checked and in one form."""

# B entries (rows), T tasks present

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradvac.engine.joint_gradient import JointGradient
from gradvac.utils.devices import index_on

TasksOfRows = Sequence[str] | Sequence[int] | Tensor


@dataclass(eq=False)
class Losses:
    """Losses of one backward.

    Attributes:
        present: Positions of the present tasks in the aligner's list, in the order they come in
            the batch (a mapping: by name). Rows that come task by task then need no sorting, and
            results do not depend on how the tasks are listed.
        roots: What a backward starts from: one entry per row `[B]`, or one scalar per present task.
        index: Position in `present` of every entry `[B]`; None for scalars per task.
        joint: Their joint gradient, where it was taken before anything else ran.
        num_parts: Parts of a task, for a rule that divides its rows; tasks are parts here then.
    """

    present: tuple[int, ...]
    roots: tuple[Tensor, ...]
    index: Tensor | None
    joint: JointGradient | None = None
    num_parts: int = 1

    @property
    def device(self) -> torch.device:
        return self.roots[0].device

    def starts(self, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        """Gradients at `roots`: those of sum_t weights[t] * loss_t; weights of 1 by default."""
        if weights is None:
            return tuple(map(torch.ones_like, self.roots))
        if self.index is None:
            pairs = zip(weights, self.roots, strict=True)
            return tuple(weight.to(loss).expand_as(loss) for weight, loss in pairs)
        return (weights.to(self.roots[0])[index_on(self.index, self.device)],)

    def task_losses(self) -> Tensor:
        """The summed, detached loss of every present task, `[T]`."""
        if self.index is None:
            return torch.stack([loss.detach().reshape(()) for loss in self.roots])
        total = self.roots[0].new_zeros(len(self.present))
        return total.index_add(0, index_on(self.index, self.device), self.roots[0].detach())

    def add_to(self, losses: dict[int, Tensor]) -> None:
        """Add the losses of the present tasks to those of earlier micro-batches."""
        for task, loss in zip(self.present, self.task_losses(), strict=True):
            losses[task] = losses[task] + loss if task in losses else loss


def positions(tasks_of_rows: TasksOfRows, tasks: Sequence[str], argument: str) -> Tensor:
    """Positions in `tasks`, int64; on the device if they came as a tensor there."""
    if isinstance(tasks_of_rows, Tensor):
        is_whole = not (tasks_of_rows.is_floating_point() or tasks_of_rows.is_complex())
        is_mask = tasks_of_rows.dtype == torch.bool
        if tasks_of_rows.dim() != 1 or not is_whole or is_mask:
            hint = f" If False is {tasks[0]!r} and True the next task, give mask.long()."
            raise ValueError(
                f"{argument}: a tensor must hold one integer per row, got "
                f"{tasks_of_rows.dtype} of shape {tuple(tasks_of_rows.shape)}."
                f"{hint if is_mask else ''}"
            )
        index = tasks_of_rows.to(torch.int64)
    else:
        if isinstance(tasks_of_rows, Set | Mapping) or not isinstance(tasks_of_rows, Iterable):
            raise ValueError(
                f"{argument}: must be a list or a tensor with the task of every row, in their "
                f"order, got {type(tasks_of_rows).__name__}."
            )
        given: list[Any] = list(tasks_of_rows)  # a generator can be read only once
        where = {task: position for position, task in enumerate(tasks)}
        found = [where.get(t) if isinstance(t, str) else _index(t) for t in given]
        if None in found:
            raise ValueError(
                f"{argument}: unknown task {given[found.index(None)]!r}; the tasks are "
                f"{list(tasks)}."
            )
        index = torch.tensor(found, dtype=torch.int64)
    # On a device the range is not checked: that would wait for it.
    if index.device.type == "cpu" and len(index):
        values = index.tolist()
        least, most = min(values), max(values)
        if least < 0 or most >= len(tasks):
            wrong = most if most >= len(tasks) else least
            raise ValueError(f"{argument}: task index {wrong} is outside 0..{len(tasks) - 1}.")
    return index


def _index(task: Any) -> int | None:
    """A whole number as such, whatever type it has; None for anything else."""
    try:
        return None if isinstance(task, bool) else operator.index(task)
    except TypeError:
        return None


def read_losses(
    losses: Tensor | Mapping[str, Tensor],
    tasks_of_rows: TasksOfRows | None,
    tasks: Sequence[str],
    num_parts: int = 1,
    first_part: int = 0,
) -> Losses:
    """Check what `backward` was given.

    With `num_parts`, each task's rows are dealt to its parts in turn, the first row to
    `first_part`; part p of task t has position `num_parts * t + p`.
    """
    if isinstance(losses, Tensor):
        return _read_rows(losses, tasks_of_rows, tasks, num_parts, first_part)
    if not isinstance(losses, Mapping):
        raise ValueError(
            "losses: must be a 1-D tensor (with tasks_of_rows) or a mapping task -> scalar loss, "
            f"got {type(losses).__name__}."
        )
    if num_parts > 1:
        raise ValueError(
            "losses: the rule divides the rows of every task, so it needs losses per row, with "
            "tasks_of_rows, instead of a mapping."
        )
    return _read_mapping(losses, tasks_of_rows, tasks)


def read_local_losses(
    losses: Tensor | Mapping[str, Tensor],
    tasks_of_rows: TasksOfRows | None,
    tasks: Sequence[str],
    num_parts: int = 1,
    first_part: int = 0,
) -> Losses | None:
    """The same for one of several processes, which may have nothing."""
    if isinstance(losses, Tensor | Mapping) and not len(losses):
        return None
    return read_losses(losses, tasks_of_rows, tasks, num_parts, first_part)


def _read_rows(
    losses: Tensor,
    tasks_of_rows: TasksOfRows | None,
    tasks: Sequence[str],
    num_parts: int,
    first_part: int,
) -> Losses:
    if tasks_of_rows is None:
        raise ValueError("tasks_of_rows: losses per row need the task of every row.")
    if losses.dim() != 1:
        raise ValueError(
            f"losses: must have one entry per row (1-D), got shape {tuple(losses.shape)}; "
            'compute them with reduction="none" and sum or average within each row. A loss that '
            "was already summed over tasks cannot be separated again."
        )
    index = positions(tasks_of_rows, tasks, "tasks_of_rows")
    if len(index) != len(losses):
        raise ValueError(
            f"tasks_of_rows: has {len(index)} entries, but losses has {len(losses)}; "
            "every entry of losses needs one task."
        )
    if not len(losses):
        raise ValueError("losses: is empty; a batch needs at least one row.")
    _check_loss(losses, "losses")
    num = num_parts * len(tasks)
    if num_parts > 1:
        index = _deal(index, num_parts, first_part)
    if index.device.type != "cpu":  # who is absent is known to the device alone: its norm is 0
        present = tuple(range(num))
    else:
        present = tuple(dict.fromkeys(index.tolist()))
    if len(present) > 1 and losses.stride() == (0,):
        raise ValueError(
            "losses: every row has the same entry, a scalar that was expanded; a loss summed over "
            'tasks cannot be separated again. Compute one loss per row (reduction="none").'
        )
    return Losses(present, (losses,), relabel(index, present, num), num_parts=num_parts)


def _deal(tasks: Tensor, num_parts: int, first: int) -> Tensor:
    """Deal the rows of every task to its parts in turn; nothing waits for the device."""
    order = tasks.argsort(stable=True)
    in_order = tasks[order]
    numbers = torch.arange(len(tasks), device=tasks.device)
    earlier = numbers - torch.searchsorted(in_order, in_order)  # rows of the same task
    part = torch.empty_like(tasks).index_copy(0, order, (earlier + first) % num_parts)
    return num_parts * tasks + part


def relabel(index: Tensor, present: Sequence[int], num_tasks: int) -> Tensor:
    """Positions in the task list -> positions in `present`."""
    if index.device.type == "cpu" and present == (*range(num_tasks),):
        return index.clone()  # the caller may write over it
    table = [-1] * num_tasks
    for number, position in enumerate(present):
        table[position] = number
    return index_on(table, index.device)[index]


def _read_mapping(
    losses: Mapping[str, Tensor], tasks_of_rows: TasksOfRows | None, tasks: Sequence[str]
) -> Losses:
    if tasks_of_rows is not None:
        raise ValueError("tasks_of_rows: goes with losses per row; a mapping names its tasks.")
    if not losses:
        raise ValueError("losses: the mapping is empty; a batch needs at least one task.")
    for task, loss in losses.items():
        if task not in tasks:
            raise ValueError(f"losses: unknown task {task!r}; the tasks are {list(tasks)}.")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"losses: the loss of {task!r} must be a scalar tensor, got {came}.")
        _check_loss(loss, f"losses[{task!r}]")
    if len(losses) > 1 and len({id(loss) for loss in losses.values()}) == 1:
        raise ValueError(
            "losses: every task has the same tensor; a loss summed over tasks cannot be separated "
            "again. Give each task its own loss, or losses per row with tasks_of_rows."
        )
    present = tuple(tasks.index(task) for task in sorted(losses))
    return Losses(present, tuple(losses[tasks[position]] for position in present), None)


def _check_loss(loss: Tensor, what: str) -> None:
    if not loss.requires_grad:
        raise ValueError(
            f"{what}: has no graph to differentiate; was it computed under torch.no_grad(), "
            "detached, or from frozen parameters only?"
        )
    if loss.is_complex():  # as torch refuses it, instead of taking the real part
        raise ValueError(f"{what}: is complex; take the part, or the size, that is to be small.")
