"""Streams of batches: rows drawn from tasks, and any stream prefetched in a thread."""

# T tasks

import atexit
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from gradvac.cuda_graph import DEVICE_WORK
from gradvac.lab.training.recipe import FULL_BATCH, BatchCo, BatchSlice, BatchStream
from gradvac.lab.training.settings import SamplingConfig
from gradvac.sampling import Epochs, costs_by_slot
from gradvac.sampling.epochs import Numbers

B = TypeVar("B", bound="TensorBatch")
Prepare = Callable[[Any], Any]
_POLL_EVERY = 0.2  # seconds after which a waiting thread checks whether it was stopped
_END_WITHIN = 30.0  # seconds that a process waits for its threads when it ends
_WORKERS: "weakref.WeakSet[_Worker]" = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class TensorBatch(ABC):
    """A batch that moves with all of its tensors.

    With a `static_shape` (its rows and columns) all batches of a run have one size, and nothing
    that differs between them stays on the host, so a step can be recorded.
    """

    @abstractmethod
    def take(self, part: BatchSlice, costs: Sequence[float] | None = None) -> Self:
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


class RowStream(Generic[B]):
    """An endless stream of batches of rows that can be stopped and continued exactly.

    Args:
        sizes: Task -> number of its rows.
        sampling: How tasks are drawn.
        make: Makes a batch of the chosen rows of every task, given its number in the stream.
        rows: Rows per batch.
        accumulation: Batches per optimizer step, which is what a schedule counts.
        num_steps: Optimizer steps of the whole training; a cap on epochs needs it.
        seed: Seed of everything that is drawn.
        part: Which rows of every batch are handed out here.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        sampling: SamplingConfig,
        make: Callable[[Sequence[Numbers], int], B],
        *,
        rows: int,
        accumulation: int,
        num_steps: int | None = None,
        seed: int,
        part: BatchSlice = FULL_BATCH,
    ) -> None:
        if sampling.slots is not None and sampling.slots > rows:
            raise ValueError(
                f"sampling.slots = {sampling.slots} is more than batch.rows = {rows}; every slot "
                "needs a row."
            )
        self._make = make
        num_rows = None if num_steps is None else num_steps * accumulation * rows
        self._sampler = sampling.build(sizes, seed=seed, num_rows=num_rows, num_steps=num_steps)
        self._epochs = Epochs(list(sampling.thinned(sizes).values()), seed=seed)
        self._rows, self._part, self._thin = rows, part, sampling.thin
        self._accumulation, self._num_batches = accumulation, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        """Draw the tasks of the rows, then each task's next ones."""
        number = self._num_batches
        counts, slots = self._sampler.draw_rows(self._rows, step=number // self._accumulation)
        self._num_batches += 1
        taken = [self._epochs.take(task, count) for task, count in enumerate(counts.tolist())]
        chosen = [rows * self._thin for rows in taken]
        costs = None if slots is None else costs_by_slot(counts, slots)
        return self._make(chosen, number).take(self._part, costs)

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream."""
        return {
            "sampler": self._sampler.state_dict(),
            **self._epochs.state_dict(),
            "num_batches": self._num_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._sampler.load_state_dict(state["sampler"])
        self._epochs.load_state_dict(state)
        self._num_batches = int(state["num_batches"])


class Prefetch(Generic[BatchCo]):
    """A stream whose next batches are ready when they are asked for.

    It hands out the batches of `stream` in order, and its state is that of `stream` after the last
    batch handed out, whatever has been prepared since: a run resumes exactly as without it. The
    stream must draw only from generators of its own, as any `BatchStream` should.

    Args:
        stream: Where batches come from; nobody else may use it from now on.
        depth: Maximum number of batches that wait.
        prepare: Applied to every batch in the thread, for example to pin its memory.
    """

    def __init__(
        self, stream: BatchStream[BatchCo], *, depth: int = 4, prepare: Prepare | None = None
    ) -> None:
        self._stream, self._depth, self._prepare = stream, depth, prepare
        self._state = stream.state_dict()
        self._worker: _Worker | None = None

    def __iter__(self) -> "Prefetch[BatchCo]":
        return self

    def __next__(self) -> BatchCo:
        """The next batch; waits for it if it is not ready."""
        if self._worker is None:
            self._worker = _Worker(self._stream, self._depth, self._prepare)
            # The thread holds no reference to us: it ends when this stream is garbage-collected.
            weakref.finalize(self, self._worker.stop)
        next_batch, self._state = self._worker.take()
        batch: BatchCo = next_batch
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        if self._worker is not None:
            self._worker.stop()
            self._worker.join()
            self._worker = None
        self._stream.load_state_dict(state)
        self._state = self._stream.state_dict()


class _Worker:
    def __init__(self, stream: BatchStream[Any], depth: int, prepare: Prepare | None) -> None:
        self._ready: queue.Queue[tuple[Any, dict[str, Any] | None]] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(stream, prepare), name="prefetch", daemon=True
        )
        self._thread.start()
        _WORKERS.add(self)

    def take(self) -> tuple[Any, dict[str, Any]]:
        batch, state = self._ready.get()
        if state is None:
            raise batch
        return batch, state

    def stop(self) -> None:
        self._stopped.set()

    def join(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def _work(self, stream: BatchStream[Any], prepare: Prepare | None) -> None:
        try:
            while not self._stopped.is_set():
                batch = next(stream)
                if prepare is not None:
                    with DEVICE_WORK:
                        batch = prepare(batch)
                self._put(batch, stream.state_dict())
        except BaseException as error:  # the loop sees it where it would have seen it
            self._put(error, None)

    def _put(self, batch: Any, state: dict[str, Any] | None) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put((batch, state), timeout=_POLL_EVERY)
            except queue.Full:
                continue
            return


@atexit.register
def _end_all() -> None:
    """Let threads end before Python does: one in the middle of a batch would abort the process."""
    workers = list(_WORKERS)
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(_END_WITHIN)
