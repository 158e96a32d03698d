"""Which task every row of an activation belongs to.

By default, row r of dimension 0 belongs to the task of loss r. Packed batches, whose dimension 0
counts tokens, say so with `rows(task_of_token)` around the part of the forward they concern.
"""

# N rows, T tasks present

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradvac.gradients._batch import TasksOfRows, positions, relabel
from gradvac.indices import index_on


class RowTasks:
    """Rows as the user named them, before the tasks of the step are known."""

    def __init__(self, given: TasksOfRows) -> None:
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def resolve(
        self, tasks: Sequence[str], present: Sequence[int], device: torch.device
    ) -> "Segments":
        """Segments for a step."""
        index = relabel(positions(self.given, tasks, "rows"), present, len(tasks))
        if index.device.type == "cpu" and bool((index < 0).any()):
            raise ValueError("rows: names a task that has no loss in this backward.")
        return Segments(index, len(present), device)


_active: list[RowTasks] = []


@contextmanager
def rows(tasks_of_rows: TasksOfRows | RowTasks) -> Iterator[None]:
    """Say which task every row of dimension 0 belongs to, for the modules that run inside.

    For packed batches, where dimension 0 counts tokens. The innermost context wins, so that the
    keys and values of cross-attention can follow the source while the rest follows the target.
    It only remembers its argument: without an attached aligner it costs nothing, so that a model
    can contain it.

    Args:
        tasks_of_rows: A task name or position per row; a list, a tensor, or a `RowTasks`.

    Example:
        >>> import gradvac
        >>> with gradvac.rows(["en-fr", "en-fr", "en-hi"]):
        ...     pass  # model(packed tokens)
    """
    given = tasks_of_rows if isinstance(tasks_of_rows, RowTasks) else RowTasks(tasks_of_rows)
    _active.append(given)
    try:
        yield
    finally:
        _active.pop()


def current_rows() -> RowTasks | None:
    """The innermost `rows` context."""
    return _active[-1] if _active else None


class Segments:
    """Rows by task: how to bring them together, and how to sum over them.

    Dimension 0 of a tensor may count several entries a row (a flattened [B * S, D]): each method
    takes its length as it comes.
    """

    def __init__(self, index: Tensor, num_tasks: int, device: torch.device) -> None:
        self.num_rows, self.num_tasks = len(index), num_tasks
        on_host = index.device.type == "cpu"
        # What the host knows without waiting for the device.
        self._counts = index.bincount(minlength=num_tasks).tolist() if on_host else None
        is_sorted = on_host and bool((index[1:] >= index[:-1]).all())
        self.order = None if is_sorted else index_on(index.argsort(stable=True), device)
        self.tasks = index_on(index, device)
        self.sizes = (self.tasks == torch.arange(num_tasks, device=device)[:, None]).sum(1)
        self._offsets: dict[int, Tensor] = {}
        self._entries: dict[int, tuple[Tensor, ...]] = {}
        self._indicators: dict[torch.dtype, Tensor] = {}

    @property
    def may_be_empty(self) -> bool:
        """Whether some task may have no row."""
        return self._counts is None or 0 in self._counts

    def counts(self, length: int) -> list[int]:
        """Entries of every task; waits for the device if the tasks came from there."""
        if self._counts is None:
            self._counts = self.sizes.tolist()
        return [count * (length // self.num_rows) for count in self._counts]

    def offsets(self, length: int) -> Tensor:
        """End of every task's entries once sorted, int32 `[T]`."""
        if length not in self._offsets:
            ends = self.sizes.cumsum(0) * (length // self.num_rows)
            self._offsets[length] = ends.to(torch.int32)
        return self._offsets[length]

    def sort(self, values: Tensor) -> Tensor:
        """Bring the entries of each task together along dimension 0."""
        if self.order is None:
            return values
        whole = values.reshape(self.num_rows, -1)
        return whole.index_select(0, self.order).view(values.shape)

    def entries_by_task(self, length: int) -> tuple[Tensor, ...]:
        """The positions of every task's entries in a dimension of `length`."""
        if length not in self._entries:
            every = torch.arange(length, device=self.tasks.device)
            self._entries[length] = self.sort(every).split(self.counts(length))
        return self._entries[length]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the entries of each task: `[N, D]` -> `[T, D]`, in float32 or better."""
        dtype = torch.promote_types(values.dtype, torch.float32)
        if values.shape[0] != self.num_rows:
            values = values.reshape(self.num_rows, -1, values.shape[-1]).sum(1, dtype=dtype)
        if dtype not in self._indicators:
            tasks = torch.arange(self.num_tasks, device=self.tasks.device)
            self._indicators[dtype] = (self.tasks == tasks[:, None]).to(dtype)
        return self._indicators[dtype] @ values.to(dtype)

    def spread(self, by_task: Tensor, length: int) -> Tensor:
        """Give every entry of a dimension 0 of `length` the value of its row or task."""
        by_row = by_task if by_task is self.tasks else by_task[self.tasks]
        return by_row.repeat_interleave(length // self.num_rows, output_size=length)
