"""Work on all cores: chunks of lines, given out in order and taken back in order.

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
from typing import Any, TypeVar

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
) -> Iterator[tuple[Item, Found]]:
    """Yield (item, work(item, *shared)) in the order of the items, from several processes.

    Args:
        work: A function that a process can import; its result depends on its arguments alone.
        items: What to work on.
        shared: Arguments that are the same for all items; sent to every process once.
        processes: How many; 0: as many as there are cores.
        alone: So many items are worked on here before processes are started; None: ten.
    """
    left = iter(items)
    for item in islice(left, _ALONE if alone is None else alone):
        yield item, work(item, *shared)
    processes = processes or num_cores()
    if processes == 1:
        yield from ((item, work(item, *shared)) for item in left)
        return
    # A fresh interpreter each: forking a process that has threads may hang.
    context = multiprocessing.get_context("spawn")
    waiting: deque[tuple[Item, Future[Found]]] = deque()
    first = list(islice(left, 1))
    if not first:
        return
    left = chain(first, left)
    with ProcessPoolExecutor(processes, context, _remember, (work, tuple(shared))) as pool:
        while True:
            for item in islice(left, 2 * processes - len(waiting)):
                waiting.append((item, pool.submit(_do, item)))
            if not waiting:
                return
            item, future = waiting.popleft()
            try:
                found = future.result()
            except BrokenProcessPool as error:
                raise ValueError(
                    "data.processes: a process that cleans or cuts text died (out of memory, or a "
                    'script without `if __name__ == "__main__":`); try data.processes=1.'
                ) from error
            yield item, found


_work: tuple[Callable[..., Any], tuple[Any, ...]] | None = None


def _remember(work: Callable[..., Any], shared: tuple[Any, ...]) -> None:
    global _work
    _work = (work, shared)


def _do(item: Any) -> Any:
    assert _work is not None
    work, shared = _work
    return work(item, *shared)
