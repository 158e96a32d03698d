"""Streams of batches: rows drawn from tasks, and any stream prefetched in a thread."""

# T tasks

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor

from gradvac.lab.training.environment import choose_device
from gradvac.lab.training.settings import RunConfig, TrainConfig
from gradvac.lab.training.workload import FULL_BATCH, BatchCo, BatchSlice, BatchStream
from gradvac.sampling import Epochs, TaskSampler, costs_by_slot
from gradvac.sampling.epochs import Numbers
from gradvac.utils.cuda_graph import DEVICE_WORK

B = TypeVar("B", bound="TensorBatch")
MadeT = TypeVar("MadeT")
_PREFETCHED = 4  # batches


@dataclass(frozen=True, eq=False)
class TensorBatch(ABC):
    """A batch that moves with all of its tensors.

    With a `static_shape` (its rows and columns) all batches of a run have one size, and nothing
    that differs between them stays on the host, so a step can be recorded.
    """

    @abstractmethod
    def take(self, batch_slice: BatchSlice, costs: Sequence[float] | None = None) -> Self:
        """The slice of one process; `costs` replaces what the rows cost."""

    def pin(self) -> Self:
        """The same in pinned memory, from which a GPU copies asynchronously."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def copy(self) -> Self:
        """The same in new memory."""
        return self._map(Tensor.clone)

    def copy_(self, other: Self) -> None:
        """Copy another batch of the same static shape into this one, asynchronously."""
        new = other._tensors()
        for name, tensor in self._tensors().items():
            assert tensor.shape == new[name].shape, "batches of a run have one size"
            tensor.copy_(new[name], non_blocking=True)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: one for name, one in values.items() if isinstance(one, Tensor)}

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = {name: change(tensor) for name, tensor in self._tensors().items()}
        return replace(self, **changed)


@dataclass(frozen=True, eq=False)
class RowBatch(TensorBatch):
    """A batch whose tensors and lists have an entry for every row.

    Attributes:
        tasks: The task of every row.
        num_tokens: Tokens that carry a loss, or rows: what the sum of the losses is divided by.
    """

    tasks: list[int]
    num_tokens: int

    def take(self, batch_slice: BatchSlice, costs: Sequence[float] | None = None) -> Self:
        """The part of one process, which needs at least a row."""
        if batch_slice.of == 1:
            return self
        rows = batch_slice.cut([1.0] * len(self.tasks) if costs is None else costs)
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        by_row = {k: value for k, value in values.items() if isinstance(value, Tensor | list)}
        return type(self)(**values | {name: value[rows] for name, value in by_row.items()})


def is_on_gpu(train: TrainConfig) -> bool:
    """Whether a run trains on a GPU."""
    return choose_device(train.device).type == "cuda"


def has_static_shape(
    fixed: bool | Literal["auto"], train: TrainConfig, batch_slice: BatchSlice, *, is_possible: Any
) -> bool:
    """Whether all batches get one size, so that a step can be recorded as a CUDA graph.

    Args:
        fixed: `batch.fixed`.
        train: [train].
        batch_slice: Which part of every batch this process has: true is for one process.
        is_possible: What "auto" needs besides a GPU and `train.cuda_graph`.
    """
    if batch_slice.of > 1 and True in (fixed, train.cuda_graph):
        raise ValueError(
            f"batch.fixed: true is for one process, but {batch_slice.of} train; set it and "
            'train.cuda_graph to "auto" or false.'
        )
    if fixed != "auto":
        return fixed
    return bool(is_possible) and train.cuda_graph is not False and is_on_gpu(train)


class TaskStream(ABC, Generic[MadeT]):
    """An endless stream of batches of several tasks that can be stopped and continued exactly.

    Rows are drawn for a *chunk* of batches at a time; a subclass says how a chunk is cut into
    batches, and what a batch is. Where the stream stands is a handful of numbers: those before the
    chunk was drawn, and how many of its batches have been handed out.

    Args:
        sizes: Rows of every task.
        sampler: Draws the tasks.
        rows: Rows per chunk.
        accumulation: Batches per optimizer step, which is what a schedule counts.
        seed: Seed of the order of rows.
        thin: Only every n-th row of a task is drawn.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        sampler: TaskSampler,
        *,
        rows: int,
        accumulation: int,
        seed: int,
        thin: int = 1,
    ) -> None:
        self._sampler, self._thin = sampler, thin
        self._epochs = Epochs([-(-size // thin) for size in sizes], seed=seed)
        self._rows_per_chunk, self._accumulation = rows, accumulation
        self._num_before = 0  # batches before this chunk
        self._draw_chunk()

    @abstractmethod
    def _cut(self, chosen: list[Numbers]) -> list[list[Numbers]]:
        """Cut the rows of a chunk, given by task, into batches: their rows, by task."""

    @abstractmethod
    def _make(self, chosen: list[Numbers]) -> MadeT:
        """Make a batch of these rows of every task."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MadeT:
        """The next batch."""
        if self._next == len(self._chunk):
            self._num_before += len(self._chunk)
            self._draw_chunk()
        self._next += 1
        return self._make(self._chunk[self._next - 1])

    def _draw_chunk(self) -> None:
        self._start = {
            "sampler": self._sampler.state_dict(),
            **self._epochs.state_dict(),
            "num_before": self._num_before,
        }
        step = self._num_before // self._accumulation
        counts, self._slots = self._sampler.draw_rows(self._rows_per_chunk, step=step)
        taken = [self._epochs.take(task, count) for task, count in enumerate(counts.tolist())]
        self._chunk, self._next = self._cut([rows * self._thin for rows in taken]), 0

    def _slot_costs(self, chosen: Sequence[Numbers]) -> list[float] | None:
        """Costs of rows by which slots are divided among processes; None without slots."""
        num_rows = [len(numbers) for numbers in chosen]
        return None if self._slots is None else costs_by_slot(num_rows, self._slots)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return {**self._start, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._sampler.load_state_dict(state["sampler"])
        self._epochs.load_state_dict(state)
        self._num_before = int(state["num_before"])
        self._draw_chunk()
        self._next = int(state["next"])


class RowStream(TaskStream[B]):
    """Batches of equally many rows, each drawn on its own.

    Args:
        config: The run's settings: how tasks are drawn, how many steps it has, its seed.
        sizes: Task -> number of its rows.
        make: Makes a batch of the chosen rows of every task.
        rows: Rows per batch.
        batch_slice: Which rows of every batch are handed out here.
    """

    def __init__(
        self,
        config: RunConfig,
        sizes: Mapping[str, int],
        make: Callable[[Sequence[Numbers]], B],
        *,
        rows: int,
        batch_slice: BatchSlice = FULL_BATCH,
    ) -> None:
        sampling, accumulation = config.sampling, config.optimizer.accumulation
        if sampling.slots is not None and sampling.slots > rows:
            raise ValueError(
                f"sampling.slots = {sampling.slots} is more than batch.rows = {rows}; every slot "
                "needs a row."
            )
        self._make_rows, self._slice = make, batch_slice
        num_steps, seed = config.train.max_steps, config.train.seed
        num_rows = num_steps * accumulation * rows
        sampler = sampling.build(sizes, seed=seed, num_rows=num_rows, num_steps=num_steps)
        super().__init__(
            list(sizes.values()),
            sampler,
            rows=rows,
            accumulation=accumulation,
            seed=seed,
            thin=sampling.thin,
        )

    def _cut(self, chosen: list[Numbers]) -> list[list[Numbers]]:
        return [chosen]

    def _make(self, chosen: list[Numbers]) -> B:
        return self._make_rows(chosen).take(self._slice, self._slot_costs(chosen))


class Prefetch(Generic[BatchCo]):
    """A stream whose next batches are ready when they are asked for.

    It hands out the batches of `stream` in order, and its state is that of `stream` after the last
    batch handed out, whatever has been prepared since: a run resumes exactly as without it. The
    stream must draw only from generators of its own, as any `BatchStream` should.

    Args:
        stream: Where batches come from; nobody else may use it from now on.
        prepare: Applied to every batch in the thread, for example to pin its memory.
    """

    def __init__(
        self, stream: BatchStream[BatchCo], *, prepare: Callable[[Any], Any] | None = None
    ) -> None:
        self._stream, self._prepare = stream, prepare
        self._state = stream.state_dict()
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._waiting: deque[Future[tuple[BatchCo, dict[str, Any]]]] = deque()

    def __iter__(self) -> "Prefetch[BatchCo]":
        return self

    def __next__(self) -> BatchCo:
        """The next batch; waits for it if it is not ready."""
        while len(self._waiting) <= _PREFETCHED:
            self._waiting.append(self._thread.submit(self._make_next))
        batch, self._state = self._waiting.popleft().result()
        return batch

    def _make_next(self) -> tuple[BatchCo, dict[str, Any]]:
        batch = next(self._stream)
        if self._prepare is not None:
            with DEVICE_WORK:
                batch = self._prepare(batch)
        return batch, self._stream.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self._thread.shutdown(cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._waiting.clear()
        self._stream.load_state_dict(state)
        self._state = self._stream.state_dict()
