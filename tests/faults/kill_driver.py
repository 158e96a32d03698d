"""Kills work in the middle and does it again; prints what came of it as JSON.

    python -m tests.faults.kill_driver FOLDER training|translation

`training` is the toy recipe, killed at each operation on files that saving consists of.
`translation` prepares, trains, measures and scores a tiny run, killed at random operations.

Every piece of work is a fork of this program, which never runs autograd itself: that would not
survive a fork. A death is SIGKILL: at the n-th operation on files, with the file that was being
written cut, or at a random moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import py3langid
import torch
from rich.console import Console

from gradvac.analysis import read_record
from gradvac.lab.training import Display, train

from ..training.toy import ToyConfig, ToyRecipe, outcome
from . import tiny

KILLED = -signal.SIGKILL
SAVING: list[tuple[Any, str]] = [
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (shutil, "rmtree"),
]
ALL = [*SAVING, (os, "unlink"), (Path, "unlink"), (Path, "mkdir")]
KILLS = {"prepare": 9, "train": 6, "similarity": 5, "score": 5}  # at operations on files
TOY = {
    "train": {
        "max_steps": 4,
        "log_every": 2,
        "record_every": 1,
        "validate_every": 3,
        "checkpoint_every": 2,
        "keep": 2,
        "writers": [],
    },
    "align": {"rule": "gradvac"},  # with a state that steps change
    "optimizer": {"warmup_steps": 3, "lr": 1e-2, "accumulation": 2},
}
Work = Callable[[Path], object]


def arm(operations: Sequence[tuple[Any, str]], at: int, cut: float) -> Callable[[], int]:
    """Die at the n-th of these operations; returns how many there were, for whoever survives."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                if call is os.fsync and not os.path.isdir(f"/proc/self/fd/{args[0]}"):
                    os.truncate(f"/proc/self/fd/{args[0]}", int(cut * os.fstat(args[0]).st_size))
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return run

    for owner, name in operations:
        setattr(owner, name, counted(getattr(owner, name)))
    return lambda: count


def fork(
    work: Callable[[], object],
    *,
    operations: Sequence[tuple[Any, str]] = ALL,
    at: int = 0,
    cut: float = 0.5,
    after: float | None = None,
) -> tuple[int, int]:
    """Work in a fork; returns its exit status and its number of operations on files.

    Args:
        work: What to do.
        operations: Those that count.
        at: The operation at which it dies; 0: none.
        cut: What is left of the file that was being written.
        after: Seconds after which it dies.
    """
    pipe_out, pipe_in = os.pipe()
    child = os.fork()
    if child == 0:
        count = arm(operations, at, cut)
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os.write(pipe_in, str(count()).encode())
        os._exit(0)
    os.close(pipe_in)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(pipe_out) as file:
        number = file.read()
    return os.waitstatus_to_exitcode(status), int(number or 0)


class Report:
    """What came of the kills so far."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"kills": 0, "operations": {}, "failed": []}

    def kill(self, work: Callable[[], object], what: object, **how: Any) -> None:
        """Kill work, which must die of it if an operation was named."""
        status, _ = fork(work, **how)
        self.found["kills"] += 1
        if "at" in how and status != KILLED:
            self.found["failed"].append([what, status, "was not killed"])

    def finish(self, run: Path, work: Work, hash_of: Callable[[], str], expected: str) -> None:
        """Do it again: it must end like work that nobody killed, and leave nothing behind."""
        status, _ = fork(partial(work, run))
        leftovers = [path.name for path in run.rglob(".writing-*")]
        if status != 0 or leftovers or hash_of() != expected:
            self.found["failed"].append([run.name, status, leftovers])

    def moments(
        self, runs: Sequence[Path], work: Work, hash_of: Any, expected: str, seconds: float
    ) -> None:
        """Kill every run three times at random moments, then finish it."""
        chance = random.Random(0)
        for run in runs:
            for _ in range(3):
                self.kill(partial(work, run), run.name, after=chance.random() * seconds)
            self.finish(run, work, partial(hash_of, run), expected)


def train_toy(run: Path) -> None:
    config = ToyConfig.model_validate(TOY)
    display = Display(Console(file=io.StringIO()), quiet=True)
    train(ToyRecipe(config), config, run, display=display)


def toy_hash(run: Path) -> str:
    """Of everything a run ends with, its record of alignments included."""
    record = {key: np.asarray(value).tobytes() for key, value in vars(read_record(run)).items()}
    found = outcome(run) | record
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def kill_training(folder: Path, report: Report) -> None:
    started = time.perf_counter()
    status, operations = fork(partial(train_toy, folder / "whole"), operations=SAVING)
    seconds = time.perf_counter() - started
    assert status == 0
    expected = toy_hash(folder / "whole")
    report.found["operations"]["train"] = operations
    for at in range(1, operations + 1):
        run = folder / f"operation-{at}"
        report.kill(partial(train_toy, run), at, operations=SAVING, at=at)
        report.finish(run, train_toy, partial(toy_hash, run), expected)
    runs = [folder / f"moment-{number}" for number in range(2)]
    report.moments(runs, train_toy, toy_hash, expected, seconds)


def translate_in(run: Path, stages: Sequence[str]) -> None:
    os.chdir(run)
    for stage in stages:
        tiny.STAGES[stage]()


def translation_hash(run: Path, stages: Sequence[str]) -> str:
    with contextlib.chdir(run):
        return " ".join(tiny.outcome(stage) for stage in stages)


def kill_translation(folder: Path, report: Report) -> None:
    py3langid.classify("once, and not in every fork")
    chance, names = random.Random(0), list(tiny.STAGES)
    before, started = folder / "before", time.perf_counter()
    expected: dict[str, str] = {}
    before.mkdir(parents=True)
    tiny.write_corpus(before)
    for stage in names:  # `before` holds what the stages before have left
        work, hash_of = (
            partial(translate_in, stages=[stage]),
            partial(translation_hash, stages=[stage]),
        )
        whole = folder / f"{stage}-whole"
        shutil.copytree(before, whole)
        status, operations = fork(partial(work, whole))
        assert status == 0, stage
        expected[stage] = hash_of(whole)
        report.found["operations"][stage] = operations
        for number in range(KILLS[stage]):
            run = folder / f"{stage}-{number}"
            shutil.copytree(before, run)
            at = chance.randint(1, operations)
            report.kill(partial(work, run), [stage, at], at=at, cut=chance.random())
            report.finish(run, work, partial(hash_of, run), expected[stage])
            shutil.rmtree(run)
        before = whole
    seconds = (time.perf_counter() - started) / (2 * sum(KILLS.values()) + len(names)) * 4
    runs = [folder / f"moments-{number}" for number in range(2)]
    for run in runs:
        run.mkdir()
        tiny.write_corpus(run)
    work, hash_of = partial(translate_in, stages=names), partial(translation_hash, stages=names)
    report.moments(runs, work, hash_of, " ".join(expected.values()), seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kinds = {"training": kill_training, "translation": kill_translation}
    made = Report()
    kinds[sys.argv[2]](Path(sys.argv[1]), made)
    print(json.dumps(made.found))
