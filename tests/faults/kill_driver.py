"""Kills preparing, training, measuring and scoring of a tiny run, and does them again.

    python kill_driver.py FOLDER

Every stage is a fork of this process, so that torch is imported once; the parent never runs
autograd, which would not survive a fork. A kill is either at a random operation on files, with the
file that was being written cut in half, or a SIGKILL at a random moment. Prints JSON.
"""

from __future__ import annotations

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

import py3langid
import tiny
import torch
import torch._dynamo  # once, before the processes part
import torch.distributed.fsdp

KILLS = {"prepare": 14, "train": 18, "similarity": 8, "score": 8}  # at operations on files
MOMENTS = 6  # SIGKILLs at random moments of all stages together


def arm(at: int, cut: float) -> Callable[[], int]:
    """Die at the n-th operation on files; returns how many there were, for whoever survives."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count != at:
                return call(*args, **options)
            if call is os.fsync and not os.path.isdir(f"/proc/self/fd/{args[0]}"):
                os.truncate(f"/proc/self/fd/{args[0]}", int(cut * os.fstat(args[0]).st_size))
            os._exit(99)

        return run

    for owner, name in [
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (os, "unlink"),
        (shutil, "rmtree"),
        (Path, "unlink"),
        (Path, "mkdir"),
    ]:
        setattr(owner, name, counted(getattr(owner, name)))
    return lambda: count


def fork(
    folder: Path, stages: list[str], *, at: int = 0, cut: float = 0.5, after: float | None = None
) -> tuple[int, int]:
    """Do stages in a fork; returns its exit status and its number of operations on files."""
    pipe_out, pipe_in = os.pipe()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        operations = arm(at, cut)
        try:
            for stage in stages:
                tiny.STAGES[stage]()
        except BaseException as error:
            os.write(2, f"{folder.name}: {type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os.write(pipe_in, str(operations()).encode())
        os._exit(0)
    os.close(pipe_in)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(pipe_out) as file:
        said = file.read()
    return os.waitstatus_to_exitcode(status), int(said or 0)


def outcome(folder: Path, stages: list[str]) -> list[str]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return [tiny.outcome(stage) for stage in stages]
    finally:
        os.chdir(before)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    py3langid.classify("once, and not in every fork")
    chance, names = random.Random(0), list(tiny.STAGES)
    report: dict[str, Any] = {"kills": 0, "operations": {}, "failed": []}
    before = folder / "before"
    before.mkdir(parents=True)
    tiny.write_corpus(before)
    expected: dict[str, list[str]] = {}

    def compare(run: Path, stages: list[str], what: object) -> None:
        status, _ = fork(run, stages)
        leftovers = [path.name for path in run.rglob(".writing-*")]
        wanted = [found for stage in stages for found in expected[stage]]
        if status != 0 or leftovers or outcome(run, stages) != wanted:
            report["failed"].append([what, status, leftovers])

    started = time.perf_counter()
    for stage in names:  # `before` holds what the stages before have left
        whole = folder / f"{stage}-whole"
        shutil.copytree(before, whole)
        status, operations = fork(whole, [stage])
        assert status == 0, stage
        expected[stage] = outcome(whole, [stage])
        report["operations"][stage] = operations
        for number in range(KILLS[stage]):
            run = folder / f"{stage}-{number}"
            shutil.copytree(before, run)
            at = chance.randint(1, operations)
            if fork(run, [stage], at=at, cut=chance.random())[0] != 99:
                report["failed"].append([stage, at, "was not killed"])
            report["kills"] += 1
            compare(run, [stage], [stage, at])
            shutil.rmtree(run)
        before = whole
    duration = (time.perf_counter() - started) / (2 * sum(KILLS.values()) + len(names)) * 4
    for number in range(MOMENTS // 3):
        run = folder / f"moments-{number}"
        run.mkdir()
        tiny.write_corpus(run)
        for _ in range(3):  # the same run, killed again and again
            fork(run, names, after=chance.random() * duration)
            report["kills"] += 1
        compare(run, names, f"moments {number}")
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
