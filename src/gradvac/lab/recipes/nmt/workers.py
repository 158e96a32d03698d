"""Work on all cores, or on a cluster: chunks of lines, given out and taken back in order.

A corpus that fits into a few chunks is worked on at once, because starting processes takes
seconds. What waits is bounded, so that memory does not grow with the corpus.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, Self, TypeVar

from gradvac.utils.hints import install_line

Item = TypeVar("Item")
Found = TypeVar("Found")
LINES_AT_ONCE = 10_000
_ALONE = 10  # chunks worked on before any process is started


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def chunks(items: Iterable[Item], size: int | None = None) -> Iterator[list[Item]]:
    """Cut a stream into lists of `size` items; None: as many as are worked on at once."""
    left = iter(items)
    while block := list(islice(left, size or LINES_AT_ONCE)):
        yield block


def ordered_map(
    work: Callable[..., Found],
    items: Iterable[Item],
    *,
    shared: Sequence[Any] = (),
    processes: int = 0,
    alone: int | None = None,
    backend: str = "processes",
) -> Iterator[tuple[Item, Found]]:
    """Yield (item, work(item, *shared)) in the order of the items, from several processes.

    Args:
        work: A function that a process can import; its result depends on its arguments alone.
        items: What to work on.
        shared: Arguments that are the same for all items; sent to every process once.
        processes: How many; 0: as many as there are cores.
        alone: So many items are worked on here before processes are started; None: ten.
        backend: "processes" of this machine, or a cluster of "ray".
    """
    left = iter(items)
    for item in islice(left, _ALONE if alone is None else alone):
        yield item, work(item, *shared)
    if backend == "processes" and (processes or num_cores()) == 1:
        yield from ((item, work(item, *shared)) for item in left)
        return
    first = list(islice(left, 1))
    if not first:
        return
    left = chain(first, left)
    made = _Cores if backend == "processes" else _Cluster
    with made(work, tuple(shared), processes) as pool:
        waiting: deque[tuple[Item, Any]] = deque()
        while True:
            for item in islice(left, 2 * pool.num - len(waiting)):
                waiting.append((item, pool.start(item)))
            if not waiting:
                return
            item, job = waiting.popleft()
            yield item, pool.result(job)


class _Cores:
    """Processes of this machine."""

    def __init__(self, work: Callable[..., Any], shared: tuple[Any, ...], processes: int) -> None:
        self.num = processes or num_cores()
        # A fresh interpreter each: forking a process that has threads may hang.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self.num, context, _remember, (work, shared))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def start(self, item: Any) -> Future[Any]:
        return self._pool.submit(_do, item)

    def result(self, job: Future[Any]) -> Any:
        try:
            return job.result()
        except BrokenProcessPool as error:
            raise ValueError(
                "data.processes: a process that cleans text died (out of memory, or a "
                'script without `if __name__ == "__main__":`); try data.processes=1.'
            ) from error


class _Cluster:
    """Tasks of Ray: on the cluster that RAY_ADDRESS names, or on an instance of this machine."""

    def __init__(self, work: Callable[..., Any], shared: tuple[Any, ...], processes: int) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError(
                f"data.backend: ray is not installed here; {install_line('ray')}."
            ) from None
        self._ray, self._is_ours = ray, not ray.is_initialized()
        if self._is_ours:
            ray.init(log_to_driver=False, include_dashboard=False)
        self.num = processes or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._task = ray.remote(work)
        self._shared = [ray.put(argument) for argument in shared]  # sent to every machine once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            self._ray.shutdown()

    def start(self, item: Any) -> Any:
        return self._task.remote(item, *self._shared)

    def result(self, job: Any) -> Any:
        return self._ray.get(job)


_work: tuple[Callable[..., Any], tuple[Any, ...]] | None = None


def _remember(work: Callable[..., Any], shared: tuple[Any, ...]) -> None:
    global _work
    _work = (work, shared)


def _do(item: Any) -> Any:
    assert _work is not None
    work, shared = _work
    return work(item, *shared)
