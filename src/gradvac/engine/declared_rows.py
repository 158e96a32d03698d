"""`gradvac.rows`: which task every row belongs to, declared by the forward itself.

By default, row r of dimension 0 belongs to the task of loss r. Packed batches, whose dimension 0
counts tokens, say so with `rows(task_of_token)` around the part of the forward they concern, or
with the sentence of every token. What is remembered is an interval of autograd's sequence numbers:
the nodes that were made inside.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradvac.engine.kernels import Segments
from gradvac.engine.losses import Losses, TasksOfRows, positions, relabel
from gradvac.utils.devices import index_on

_MOST_KEPT = 4096  # blocks; a forward that is never differentiated leaves its own behind


class RowTasks:
    """The tasks of rows as the user gave them, before the tasks of the step are known.

    Args:
        tasks_of_rows: A task name or position per row.
        entries: Instead: the entry of `losses` that each row belongs to. A rule that divides the
            rows of a task (`Rule.parts_per_task`) needs to know it.
        ascending: Declares that task positions never decrease from row to row, so the rows of a
            task are together and nothing has to be sorted on a GPU. If that is wrong, the host
            raises an error, and a GPU stops with an assertion.
    """

    def __init__(
        self,
        tasks_of_rows: TasksOfRows | None = None,
        *,
        entries: Sequence[int] | Tensor | None = None,
        ascending: bool = False,
    ) -> None:
        given = entries if tasks_of_rows is None else tasks_of_rows
        if given is None or (entries is not None and tasks_of_rows is not None):
            raise ValueError("tasks_of_rows, entries: give one of the two.")
        self._tasks, self._entries, self._ascending = tasks_of_rows, entries, ascending
        self._num_rows = len(given)

    def __len__(self) -> int:
        return self._num_rows

    def resolve(self, tasks: Sequence[str], losses: Losses, device: torch.device) -> Segments:
        """Segments for a step."""
        present = losses.present
        ascending = self._ascending and losses.num_parts == 1
        if self._tasks is None:
            index = self._by_entry(losses)
        else:
            index = self._by_task(self._tasks, tasks, losses)
        if ascending and index.is_cpu and bool((torch.tensor(present)[index].diff() < 0).any()):
            raise ValueError("rows: tasks fall from row to row; leave out ascending=True.")
        ascending = ascending and list(present) == sorted(present)
        return Segments(index, len(present), device, ascending=ascending)

    def _by_task(self, given: TasksOfRows, tasks: Sequence[str], losses: Losses) -> Tensor:
        if losses.num_parts > 1:
            raise ValueError(
                "rows: the rule divides the rows of every task; declare the entry of losses that "
                "each row belongs to, gradvac.RowTasks(entries=...), instead of its task."
            )
        index = relabel(positions(given, tasks, "rows"), losses.present, len(tasks))
        if index.is_cpu and bool((index < 0).any()):
            raise ValueError("rows: names a task that has no loss in this backward.")
        return index

    def _by_entry(self, losses: Losses) -> Tensor:
        entries = torch.as_tensor(self._entries)
        if entries.is_floating_point() or entries.dtype == torch.bool:
            raise ValueError(f"rows: entries must be integers, got {entries.dtype}.")
        entries = entries.to(torch.int64)
        if losses.index is None and len(losses.present) == 1:
            return torch.zeros_like(entries)
        if losses.index is None:
            raise ValueError("rows: entries are those of losses per row; name the tasks instead.")
        num = len(losses.index)
        if entries.is_cpu and len(entries) and not 0 <= entries.min() <= entries.max() < num:
            raise ValueError(f"rows: entries must be 0..{num - 1}, as losses has {num}.")
        device = losses.index.device if entries.is_cpu else entries.device
        return index_on(losses.index, device)[index_on(entries, device)]


class _Block(NamedTuple):
    """A `rows` block that has run: the sequence numbers of its nodes, and their rows."""

    start: int
    end: int
    rows: RowTasks


class _Blocks(threading.local):
    """The blocks of one thread, whose sequence numbers are its own."""

    def __init__(self) -> None:
        self.done: list[_Block] = []
        self.lost_before = 0  # blocks below this sequence number were dropped


_blocks = _Blocks()
_listeners: "weakref.WeakSet[Any]" = weakref.WeakSet()


def listen(engine: object) -> None:
    """Keep blocks from now on, as long as the engine lives: without one, nothing is kept."""
    _listeners.add(engine)


@contextmanager
def rows(tasks_of_rows: TasksOfRows | RowTasks) -> Iterator[None]:
    """Say which task every row of dimension 0 belongs to, for what is computed inside.

    For packed batches, where dimension 0 counts tokens. The innermost block wins, so that the
    keys and values of cross-attention can follow the source while the rest follows the target.
    It only remembers its argument, and without an aligner not even that, so a model can contain it.

    Args:
        tasks_of_rows: A task name or position per row; a list, a tensor, or a `RowTasks`.

    Examples:
        >>> import gradvac
        >>> with gradvac.rows(["en-fr", "en-fr", "en-hi"]):
        ...     pass  # model(packed tokens)
    """
    given = tasks_of_rows if isinstance(tasks_of_rows, RowTasks) else RowTasks(tasks_of_rows)
    if not _listeners or not torch.is_grad_enabled() or not len(given):
        yield
        return
    start = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        end = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if end > start:
            _blocks.done.append(_Block(start, end, given))
        if len(_blocks.done) > _MOST_KEPT:
            _blocks.lost_before = _blocks.done.pop(0).end


class DeclaredRows:
    """The blocks of the forward that a backward belongs to."""

    def __init__(self) -> None:
        # An inner block ends, and is kept, before the one around it.
        self._blocks = _blocks.done
        self.lost_before = _blocks.lost_before

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def since(self, oldest: int) -> bool:
        """Whether a block may have nodes of a graph whose oldest has this number."""
        return any(block.end > oldest for block in self._blocks)

    def of(self, node: Any) -> RowTasks | None:
        """The rows of the innermost block in which a node was made."""
        number = node._sequence_nr()
        if number < self.lost_before and self._blocks and number < self._blocks[0].start:
            raise ValueError(
                "rows: this forward ran so long ago that its gradvac.rows(...) blocks are "
                "forgotten; call backward before running thousands of other forwards."
            )
        for block in self._blocks:
            if block.start <= number < block.end:
                return block.rows
        return None

    def forget(self, nodes: Sequence[Any]) -> None:
        """Drop the blocks of nodes whose graph is done with."""
        numbers = [node._sequence_nr() for node in nodes]
        low, high = min(numbers), max(numbers)
        _blocks.done = [b for b in _blocks.done if b.end <= low or b.start > high]
