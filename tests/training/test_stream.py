"""Batches prepared ahead are the same batches, and a stream of them stands where it seems to."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gradvac.lab.training import Prefetch

from ..drivers import run_driver


@dataclass(frozen=True)
class Number:
    """A batch that is its number."""

    value: int
    num_tokens: int = 1


class Numbers:
    """A stream that counts, and breaks where it is told to."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.next, self.breaks_at = 0, breaks_at

    def __next__(self) -> Number:
        if self.next == self.breaks_at:
            raise ValueError("data: damaged")
        self.next += 1
        return Number(self.next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


def test_state_is_that_of_the_last_batch_handed_out() -> None:
    inner = Numbers()
    stream = Prefetch(inner)
    assert stream.state_dict() == {"next": 0}
    assert [next(stream).value for _ in range(5)] == [0, 1, 2, 3, 4]
    while inner.next < 9:  # the thread runs ahead, as far as it may
        time.sleep(0.01)
    assert stream.state_dict() == {"next": 5}
    other = Prefetch(Numbers())
    next(other)
    other.load_state_dict(stream.state_dict())
    assert [next(other).value for _ in range(3)] == [5, 6, 7]
    assert other.state_dict() == {"next": 8}


def test_what_breaks_the_stream_reaches_the_loop_in_its_turn() -> None:
    stream = Prefetch(Numbers(breaks_at=2), prepare=lambda batch: Number(10 * batch.value))
    assert [next(stream).value for _ in range(2)] == [0, 10]
    with pytest.raises(ValueError, match="data: damaged"):
        next(stream)


def test_the_thread_ends_with_its_stream() -> None:
    before = set(threading.enumerate())
    stream = Prefetch(Numbers())
    next(stream)
    (thread,) = set(threading.enumerate()) - before
    del stream
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


ENDS_EARLY = """
import torch
from gradvac.lab.training import Prefetch

class Slow:
    def __next__(self):
        x = torch.ones(300, 300)
        for _ in range(200):
            x = (1e-3 * x @ x).relu()
        return x

    def state_dict(self):
        return {}

torch.set_num_threads(1)
stream = Prefetch(Slow())
next(stream)
"""


def test_a_process_that_ends_in_the_middle_of_a_batch_ends_well(tmp_path: Path) -> None:
    """Python lets go of a thread that is inside of torch by aborting the process."""
    (tmp_path / "ends.py").write_text(ENDS_EARLY)
    assert run_driver(tmp_path / "ends.py").stderr == ""
