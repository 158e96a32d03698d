"""Batches prepared ahead, in a thread of their own, while the step before them runs."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic

from gradvac.cuda_graph import DEVICE_WORK
from gradvac.lab.training.recipe import BatchCo, BatchStream

Prepare = Callable[[Any], Any]
_LOOK_EVERY = 0.2  # seconds after which a waiting thread checks whether it was stopped
_PATIENCE = 30.0  # seconds that a process waits for its threads when it ends
_AT_WORK: "weakref.WeakSet[_Worker]" = weakref.WeakSet()


class Ahead(Generic[BatchCo]):
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

    def __iter__(self) -> "Ahead[BatchCo]":
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
            target=self._work, args=(stream, prepare), name="batches ahead", daemon=True
        )
        self._thread.start()
        _AT_WORK.add(self)

    def take(self) -> tuple[Any, dict[str, Any]]:
        batch, state = self._ready.get()
        if state is None:
            raise batch
        return batch, state

    def stop(self) -> None:
        self._stopped.set()

    def join(self, patience: float | None = None) -> None:
        self._thread.join(patience)

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
                self._ready.put((batch, state), timeout=_LOOK_EVERY)
            except queue.Full:
                continue
            return


@atexit.register
def _end_all() -> None:
    """Let threads end before Python does: one in the middle of a batch would abort the process."""
    at_work = list(_AT_WORK)
    for worker in at_work:
        worker.stop()
    for worker in at_work:
        worker.join(_PATIENCE)
