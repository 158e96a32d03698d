"""Kills trainings of the toy recipe and continues them; prints what came of it as JSON.

    python kill_driver.py FOLDER

Every training is a fork of this process, so that torch is imported once. Deaths are SIGKILL:
at each operation on files that saving consists of, half-written files included, and at random
moments. The parent itself never runs autograd, which would not survive a fork.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch._dynamo  # once, before the processes part
import torch.distributed.fsdp
from toy import ToyConfig, ToyRecipe, outcome

from gradvac.analysis import read_record
from gradvac.training import Display, train

SETTINGS = {
    "train": {
        "max_steps": 4,
        "log_every": 2,
        "record_every": 1,
        "validate_every": 3,
        "checkpoint_every": 2,
        "keep": 2,
        "writers": [],
    },
    "optimizer": {"warmup_steps": 3, "lr": 1e-2, "accumulation": 2},
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(at: int) -> Callable[[], int]:
    """Die at the n-th operation on files; returns how many there were, for whoever survives."""
    count = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        writes = call in (torch.save, safetensors.torch.save_file)

        def run(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at and not writes:
                die()
            result = call(*args, **options)
            if count == at:
                path = args[1] if isinstance(args[1], Path) else Path(args[1].name)
                os.truncate(path, path.stat().st_size // 2)
                die()
            return result

        return run

    for owner, name in [
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (shutil, "rmtree"),
        (torch, "save"),
        (safetensors.torch, "save_file"),
    ]:
        setattr(owner, name, wrapped(getattr(owner, name)))
    return lambda: count


def fork(run: Path, *, die_at: int = 0, die_after: float | None = None) -> tuple[int, int]:
    """Train in a fork; returns its exit status and its number of operations on files."""
    pipe_out, pipe_in = os.pipe()
    child = os.fork()
    if child == 0:
        operations = arm(die_at)
        config = ToyConfig.model_validate(SETTINGS)
        with open(os.devnull, "w") as nowhere:
            sys.stdout = nowhere
            train(ToyRecipe(config), config, run, display=Display(quiet=True))
        os.write(pipe_in, str(operations()).encode())
        os._exit(0)
    os.close(pipe_in)
    if die_after is not None:
        time.sleep(die_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(pipe_out) as file:
        said = file.read()
    return os.waitstatus_to_exitcode(status), int(said or 0)


def digest(run: Path) -> str:
    """Of everything a run ends with, its record of alignments included."""
    record = {key: np.asarray(value).tobytes() for key, value in vars(read_record(run)).items()}
    found = outcome(run) | record
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    started = time.perf_counter()
    status, num_operations = fork(folder / "whole")
    duration = time.perf_counter() - started
    expected = digest(folder / "whole")
    report: dict[str, Any] = {"status": status, "operations": num_operations, "failed": []}

    def finish(run: Path, what: object) -> None:
        status, _ = fork(run)
        leftovers = [path.name for path in run.rglob(".writing-*")]
        if status != 0 or leftovers or digest(run) != expected:
            report["failed"].append([what, status, leftovers])

    for operation in range(1, num_operations + 1):
        run = folder / f"operation-{operation}"
        killed, _ = fork(run, die_at=operation)
        if killed != -signal.SIGKILL:
            report["failed"].append([operation, killed, "was not killed"])
        finish(run, operation)
    chance = random.Random(0)
    for number in range(4):
        run = folder / f"moment-{number}"
        for _ in range(3):  # the same run, killed again and again
            fork(run, die_after=chance.random() * duration)
        finish(run, f"moment {number}")
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
