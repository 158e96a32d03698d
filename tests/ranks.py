"""The ranks of a job, started by a driver: one launcher for all tests of several processes.

A driver is a program (`drivers.run_driver`) of which every rank is a fork; the driver itself never
runs autograd, which would not survive that.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)
Work = Callable[[int], object]


class Failed(NamedTuple):
    """What a rank raised."""

    kind: str
    message: str


GONE = Failed("Gone", "ended without a result")


class StartedRanks:
    """Processes that each call `work(rank)`.

    Args:
        work: What a rank does; its result is handed back.
        size: Number of ranks; one has no process group.
        folder: Where they meet and leave their results.
        as_torchrun: Let them know of each other as torchrun does, by environment variables, and
            make no process group.
    """

    def __init__(self, work: Work, size: int, folder: Path, *, as_torchrun: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        launch = time.monotonic_ns()
        self._results = [folder / f"result-{launch}-{rank}" for rank in range(size)]
        rendezvous, port = folder / f"rendezvous-{launch}", _free_port()

        def run(rank: int) -> None:
            torch.set_num_threads(1)
            try:
                if size > 1 and as_torchrun:
                    _announce(rank, size, port)
                elif size > 1:
                    dist.init_process_group("gloo", f"file://{rendezvous}", PATIENCE, size, rank)
                result = work(rank)
            except BaseException as error:
                traceback.print_exc()
                result = Failed(type(error).__name__, str(error))
            torch.save(result, self._results[rank])
            os._exit(0)  # others may be gone: process groups cannot be left in good order

        context = multiprocessing.get_context("fork")
        self._processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
        for process in self._processes:
            process.start()

    def wait(self, seconds: float = 90) -> list[Any]:
        """By rank: its result, or how it failed."""
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        return [torch.load(p, weights_only=False) if p.exists() else GONE for p in self._results]


def run_ranks(
    work: Work, size: int, folder: Path, *, as_torchrun: bool = False, seconds: float = 90
) -> list[Any]:
    """Start ranks and wait for their results; see `StartedRanks`."""
    return StartedRanks(work, size, folder, as_torchrun=as_torchrun).wait(seconds)


def failures(results: Sequence[Any]) -> list[str]:
    """What went wrong in which rank."""
    return [
        f"rank {rank}: {result.kind}: {result.message}"
        for rank, result in enumerate(results)
        if isinstance(result, Failed)
    ]


def _announce(rank: int, size: int, port: int) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    numbers |= {"GROUP_RANK": 0, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "test"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
