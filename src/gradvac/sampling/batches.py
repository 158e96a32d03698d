"""A batch sampler over tasks for any `DataLoader`, which continues exactly where it stopped."""

# T tasks

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch.utils.data import Sampler

from gradvac.sampling.epochs import Epochs
from gradvac.sampling.sampler import TaskEpochs, TaskSampler


class TaskBatchSampler(Sampler[list[int]]):
    """Batches of row numbers, whose tasks are drawn by size and temperature.

    Give it to a `DataLoader` as `batch_sampler`. Every row of a batch draws its task, then takes
    the task's next row; a task's rows come in a new order every time they have all been seen. In a
    batch, rows of a task lie together, as an aligner likes them.

    Batch n is a function of the arguments and of n alone. A pass (`for batch in loader`) goes on
    where the last one ended, and `set_epoch`, which trainers call, goes to the beginning of a pass,
    unless it is in the middle of it already.

    Args:
        tasks: The task of every row of the data set: a list or a column. Or task -> number of its
            rows, which follow each other in this order, as in a `ConcatDataset`.
        batch_size: Rows of a batch, of all processes together.
        temperature: 1 follows the data, larger is flatter, infinity is uniform. "auto": between 1
            and 5, by the sizes of the tasks and `num_rows`, because rows that are seen often teach
            less.
        schedule: Later phases: (first optimizer step, temperature), in order.
        high_first: Until this optimizer step, only tasks with at least as many rows as the average
            one are drawn.
        most_epochs: No task is seen more often than this on average, and the others get its rows;
            needs `num_rows`. None: no cap.
        num_rows: Rows that training draws in all, passes and processes together; for
            `most_epochs` and "auto".
        slots: Draw this many tasks for a batch, and divide its rows among them; None: every row
            draws its task.
        num_batches: Batches of a pass; None: as many rows as the data set has.
        batches_per_step: Batches of an optimizer step, by which `schedule` counts: with gradient
            accumulation, as many as are accumulated.
        seed: Of everything drawn.
        rank: This process.
        num_ranks: Processes that each take an equal part of every batch, with `slots` the rows of
            few tasks. Not where something else divides batches among processes, as Accelerate and
            Hugging Face's Trainer do.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> rows = [("fr", n) for n in range(90)] + [("hi", n) for n in range(10)]
        >>> sampler = TaskBatchSampler([task for task, _ in rows], 8, temperature=5.0)
        >>> print(sampler.table())
        task  rows  share  rows seen  epochs
        fr      90    61%         63     0.7
        hi      10    39%         41     4.1
        >>> loader = DataLoader(rows, batch_sampler=sampler, collate_fn=list)
        >>> next(iter(loader))[-1]
        ('hi', 8)
        >>> sampler.state_dict()["batch"]  # belongs into a checkpoint
        1
    """

    def __init__(
        self,
        tasks: Iterable[str] | Mapping[str, int],
        batch_size: int,
        *,
        temperature: float | Literal["auto"] = 5.0,
        schedule: Sequence[tuple[int, float]] = (),
        high_first: int = 0,
        most_epochs: float | None = None,
        num_rows: int | None = None,
        slots: int | None = None,
        num_batches: int | None = None,
        batches_per_step: int = 1,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._rows = _rows_by_task(tasks)
        sizes = {task: len(rows) for task, rows in self._rows.items()}
        _check(batch_size, slots, num_batches, batches_per_step, rank, num_ranks)
        if num_rows is None and (most_epochs is not None or temperature == "auto"):
            name = 'temperature = "auto"' if most_epochs is None else "most_epochs"
            raise ValueError(
                f"{name}: needs num_rows, the rows that training draws in all: batch_size times "
                "batches times passes."
            )
        self.tasks, self.batch_size, self.drop_last = tuple(sizes), batch_size, True
        self._num_batches = num_batches or -(-sum(sizes.values()) // batch_size)
        self._batches_per_step, self._rank, self._num_ranks = batches_per_step, rank, num_ranks
        self._seed, self._sizes = seed, sizes
        self._sampler = TaskSampler(
            sizes,
            temperature,
            schedule=schedule,
            most_epochs=most_epochs,
            high_first=high_first,
            slots=slots,
            seed=seed,
            num_rows=num_rows,
        )
        self._first_epoch: int | None = 0  # what callers count as 0; None: not known yet
        self._known: tuple[int, list[int]]  # a batch, and the rows drawn of every task before it
        self._restore(0, [0] * len(sizes))

    def __len__(self) -> int:
        """Batches of a pass."""
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        end = (self._next // self._num_batches + 1) * self._num_batches
        while self._next < end:
            yield self._take()

    def _take(self) -> list[int]:
        """The next batch, or the part of it that this process takes."""
        step = self._next // self._batches_per_step
        counts, _ = self._sampler.draw_rows(self.batch_size, step=step)
        self._next += 1
        chosen = [
            rows[self._epochs.take(task, count)]
            for task, (rows, count) in enumerate(
                zip(self._rows.values(), counts.tolist(), strict=True)
            )
        ]
        size = self.batch_size // self._num_ranks
        numbers: list[int] = np.concatenate(chosen)[self._rank * size :][:size].tolist()
        return numbers

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass, counted from 0, unless this pass has begun already.

        The first call after `load_state_dict` moves nothing: it tells which number the caller has
        for the pass that goes on, as some count from 0 again when they continue.
        """
        if self._first_epoch is None:
            self._first_epoch = self._next // self._num_batches - epoch
        wanted = epoch + self._first_epoch
        if self._next // self._num_batches != wanted:
            first = wanted * self._num_batches
            self._restore(first, self._drawn_until(first))

    def _drawn_until(self, batch: int) -> list[int]:
        """Rows of every task in the batches before one: draws anew since the last it was asked."""
        first, known = self._known if self._known[0] <= batch else (0, [0] * len(self.tasks))
        drawn = np.array(known, dtype=np.int64)
        self._sampler.load_state_dict({"seed": self._seed, "num_calls": first})
        for number in range(first, batch):
            step = number // self._batches_per_step
            drawn += self._sampler.draw_rows(self.batch_size, step=step)[0]
        self._sampler.load_state_dict({"seed": self._seed, "num_calls": self._next})
        rows: list[int] = drawn.tolist()
        self._known = batch, rows
        return rows

    def _restore(self, batch: int, drawn: list[int]) -> None:
        self._next, self._known = batch, (batch, drawn)
        self._sampler.load_state_dict({"seed": self._seed, "num_calls": batch})
        self._epochs = Epochs(list(self._sizes.values()), seed=self._seed)
        self._epochs.load_state_dict({"drawn": drawn})

    def effective_epochs(self, num_batches: int | None = None) -> list[TaskEpochs]:
        """How often each task's data will be seen.

        Args:
            num_batches: Batches that training takes in all; None: those of one pass.
        """
        num = self._num_batches if num_batches is None else num_batches
        steps = -(-num // self._batches_per_step)
        return self._sampler.effective_epochs(
            num_steps=steps, rows_per_step=self.batch_size * num / max(1, steps)
        )

    def table(self, num_batches: int | None = None) -> str:
        """`effective_epochs` as text, to print before training."""
        lines = [("task", "rows", "share", "rows seen", "epochs")]
        for one in self.effective_epochs(num_batches):
            seen = f"{one.num_drawn:,.0f}", f"{one.epochs:.1f}"
            lines.append((one.task, f"{one.size:,}", f"{one.probability:.0%}", *seen))
        name, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join(
            line[0].ljust(name)
            + "".join(f"  {cell:>{w}}" for cell, w in zip(line[1:], widths, strict=True))
            for line in lines
        )

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """The position, for a checkpoint.

        Args:
            num_batches: Batches that training has taken so far, in all passes. A `DataLoader` with
                workers asks for batches before training takes them, so that only the loop knows.
                None: as many as were handed out, which is right without workers.
        """
        what = {"seed": self._seed, "batch_size": self.batch_size, "sizes": dict(self._sizes)}
        if num_batches is None:
            return {"batch": self._next, **self._epochs.state_dict(), **what}
        return {"batch": num_batches, "drawn": self._drawn_until(num_batches), **what}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there: the rest of the pass that was interrupted, then the next ones.

        Raises:
            ValueError: It was saved with other data, another batch size or seed, which would go
                on with rows that were seen already.
        """
        for name, own in self.state_dict().items():
            if name not in ("batch", "drawn") and state[name] != own:
                raise ValueError(
                    f"state: was saved with {name} = {state[name]!r}, but this sampler has "
                    f"{own!r}; continue with the same, or start afresh without this state."
                )
        self._first_epoch = None
        self._restore(int(state["batch"]), list(state["drawn"]))


def _rows_by_task(tasks: Iterable[str] | Mapping[str, int]) -> dict[str, Any]:
    """Task -> the numbers of its rows, in the order of the data set."""
    if isinstance(tasks, Mapping):
        ends = np.cumsum(list(tasks.values()))
        starts = ends - np.array(list(tasks.values()))
        blocks = zip(tasks, starts, ends, strict=True)
        return {task: np.arange(start, end) for task, start, end in blocks}
    every = np.asarray(list(tasks))
    if len(every) and every.dtype.kind not in "US":
        raise ValueError(
            "tasks: must be the name of every row's task, or task -> number of rows, got "
            f"{every.dtype} numbers; give names, as in [names[n] for n in column]."
        )
    return {str(task): np.flatnonzero(every == task) for task in dict.fromkeys(every.tolist())}


def _check(
    batch_size: int,
    slots: int | None,
    num_batches: int | None,
    batches_per_step: int,
    rank: int,
    num_ranks: int,
) -> None:
    sizes = {"batch_size": batch_size, "batches_per_step": batches_per_step, "num_ranks": num_ranks}
    for name, size in {**sizes, "num_batches": 1 if num_batches is None else num_batches}.items():
        if size < 1:
            raise ValueError(f"{name}: must be at least 1, got {size}.")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank: must be from 0 to {num_ranks - 1}, got {rank}.")
    if batch_size % num_ranks:
        raise ValueError(
            f"batch_size: must be a multiple of num_ranks = {num_ranks}, got {batch_size}: "
            "gradients are means over processes, so each needs as many rows."
        )
    if slots is not None and (slots < 1 or batch_size % slots or slots % num_ranks):
        raise ValueError(
            f"slots: must divide batch_size = {batch_size} and be a multiple of num_ranks = "
            f"{num_ranks}, so that all slots and all processes have as many rows; got {slots}."
        )


__all__ = ["TaskBatchSampler"]
