"""Processes that run checks together, in one start for many checks.

Every check is a function of the processes it runs in; all of them are run in the same four
processes, in groups of two, three or four, and what they found is read by the tests, one by one.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4
PATIENCE = timedelta(seconds=40)


@dataclass
class World:
    """The processes of one check."""

    rank: int
    size: int
    group: dist.ProcessGroup


Check = Callable[[World], None]


def run_driver(*args: object, seconds: float) -> str:
    """Run the driver, which forks: it imports torch once for all processes."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.distributed.driver", *map(str, args)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.stdout + done.stderr


def start(target: Callable[..., None], args: Sequence[object], num: int) -> list[Any]:
    """Start processes by forking this one, which must not have used torch before."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=target, args=(rank, *args)) for rank in range(num)]
    for process in started:
        process.start()
    return started


def join_world(rank: int, size: int, folder: Path) -> None:
    """Meet the others by way of a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )


def run_checks(rank: int, folder: Path, checks: Mapping[str, tuple[Check, int]]) -> None:
    """One process: run every check in a group of its size; write down what it found."""
    join_world(rank, SIZE, folder)
    groups = {size: dist.new_group(list(range(size)), timeout=PATIENCE) for size in (2, 3, 4)}
    for name, (check, size) in checks.items():
        found, begin = "", time.monotonic()
        if rank < size:
            torch.manual_seed(0)
            try:
                check(World(rank, size, groups[size]))
            except BaseException:
                found = traceback.format_exc()
        entry = {"name": name, "found": found, "seconds": time.monotonic() - begin}
        with (folder / f"found{rank}.jsonl").open("a") as file:
            print(json.dumps(entry), file=file)
        dist.barrier()
    dist.destroy_process_group()


def read_results(folder: Path) -> dict[str, dict[int, str]]:
    """Check -> process -> what went wrong there, or an empty string."""
    found: dict[str, dict[int, str]] = {}
    for rank in range(SIZE):
        path = folder / f"found{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            found.setdefault(entry["name"], {})[rank] = entry["found"]
    return found
