"""Kills work in the middle and does it again; prints what came of it as JSON.

    python -m tests.faults.kill_driver FOLDER training|translation

`training` is the toy recipe, killed at each operation on files that saving consists of.
`translation` prepares, trains, measures and scores a tiny run, killed at random operations.

Every piece of work is a fork of this program, which never runs autograd itself: that would not
survive a fork. SIGKILL leaves what lies in the folder at that moment; so work that is killed at
many operations is done once, and its folder is copied before each of them, with the file that was
being written cut. Deaths at random moments are real.
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
from collections.abc import Callable, Mapping, Sequence
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


def arm(
    operations: Sequence[tuple[Any, str]], run: Path, copies: Mapping[int, tuple[Path, float]]
) -> Callable[[], int]:
    """Copy a run before the n-th of these operations; returns how many there were.

    Args:
        operations: Those that count.
        run: What is copied.
        copies: Number of an operation -> where to, and what is left of the file being written.
    """
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count in copies:
                copy, cut = copies[count]
                shutil.copytree(run, copy)
                if call is os.fsync:
                    file = copy / Path(f"/proc/self/fd/{args[0]}").readlink().relative_to(run)
                    if file.is_file():
                        os.truncate(file, int(cut * file.stat().st_size))
            return call(*args, **options)

        return do

    for owner, name in operations:
        setattr(owner, name, counted(getattr(owner, name)))
    return lambda: count


def fork(
    work: Work,
    run: Path,
    *,
    operations: Sequence[tuple[Any, str]] = ALL,
    copies: Mapping[int, tuple[Path, float]] | None = None,
    after: float | None = None,
) -> tuple[int, int]:
    """Work in a fork; returns its exit status and its number of operations on files.

    Args:
        work: What to do.
        run: Where.
        operations: Those that count.
        copies: See `arm`.
        after: Seconds after which it dies.
    """
    pipe_out, pipe_in = os.pipe()
    child = os.fork()
    if child == 0:
        count = arm(operations, run, copies or {})
        try:
            work(run)
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

    def operations(
        self,
        runs: Mapping[int, tuple[Path, float]],
        begun: Path,
        work: Work,
        hash_of: Callable[[Path], str],
        expected: str,
        **how: Any,
    ) -> None:
        """Kill work at these operations, with so much of a file written; then finish it."""
        status, _ = fork(work, begun, copies=runs, **how)
        assert status == 0
        for run, _ in runs.values():
            self.found["kills"] += 1
            self.finish(run, work, hash_of, expected)
            shutil.rmtree(run)

    def moments(
        self, runs: Sequence[Path], work: Work, hash_of: Any, expected: str, seconds: float
    ) -> None:
        """Kill every run three times at random moments, then finish it."""
        chance = random.Random(0)
        for run in runs:
            for _ in range(3):
                fork(work, run, after=chance.random() * seconds)
                self.found["kills"] += 1
            self.finish(run, work, hash_of, expected)

    def finish(self, run: Path, work: Work, hash_of: Callable[[Path], str], expected: str) -> None:
        """Do it again: it must end like work that nobody killed, and leave nothing behind."""
        status, _ = fork(work, run)
        leftovers = [path.name for path in run.rglob(".writing-*")]
        if status != 0 or leftovers or hash_of(run) != expected:
            self.found["failed"].append([run.name, status, leftovers])


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
    status, operations = fork(train_toy, folder / "whole", operations=SAVING)
    seconds = time.perf_counter() - started
    assert status == 0
    expected = toy_hash(folder / "whole")
    report.found["operations"]["train"] = operations
    runs = {at: (folder / f"operation-{at}", 0.5) for at in range(1, operations + 1)}
    begun = folder / "begun"
    report.operations(runs, begun, train_toy, toy_hash, expected, operations=SAVING)
    moments = [folder / f"moment-{number}" for number in range(2)]
    report.moments(moments, train_toy, toy_hash, expected, seconds)


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
        whole, begun = (folder / f"{stage}-{name}" for name in ("whole", "begun"))
        for run in (whole, begun):
            shutil.copytree(before, run)
        status, operations = fork(work, whole)
        assert status == 0, stage
        expected[stage] = hash_of(whole)
        report.found["operations"][stage] = operations
        runs = {
            at: (folder / f"{stage}-{at}", chance.random())
            for at in chance.sample(range(1, operations + 1), KILLS[stage])
        }
        report.operations(runs, begun, work, hash_of, expected[stage])
        before = whole
    seconds = (time.perf_counter() - started) / (sum(KILLS.values()) + 2 * len(names)) * 4
    places = [folder / f"moments-{number}" for number in range(2)]
    for run in places:
        run.mkdir()
        tiny.write_corpus(run)
    work, hash_of = partial(translate_in, stages=names), partial(translation_hash, stages=names)
    report.moments(places, work, hash_of, " ".join(expected.values()), seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kinds = {"training": kill_training, "translation": kill_translation}
    made = Report()
    kinds[sys.argv[2]](Path(sys.argv[1]), made)
    print(json.dumps(made.found))
