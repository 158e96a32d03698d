"""Checks that several processes run together, in one start for many checks.

Every check is a function of the processes it runs in; all of them are run in the same four
processes, in groups of two, three or four, and what they found is read by the tests, one by one.
"""

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

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


def run_checks(rank: int, folder: Path, checks: Mapping[str, tuple[Check, int]]) -> None:
    """One process: run every check in a group of its size; write down what it found."""
    groups = {size: dist.new_group(list(range(size)), timeout=PATIENCE) for size in (2, 3, 4)}
    for name, (check, size) in checks.items():
        found = ""
        if rank < size:
            torch.manual_seed(0)
            try:
                check(World(rank, size, groups[size]))
            except BaseException:
                found = traceback.format_exc()
        with (folder / f"found{rank}.jsonl").open("a") as file:
            print(json.dumps({"name": name, "found": found}), file=file)
        dist.barrier()


def read_results(folder: Path) -> dict[str, dict[int, str]]:
    """Check -> process -> what went wrong there, or an empty string."""
    found: dict[str, dict[int, str]] = {}
    for rank in range(SIZE):
        path = folder / f"found{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            found.setdefault(entry["name"], {})[rank] = entry["found"]
    return found
