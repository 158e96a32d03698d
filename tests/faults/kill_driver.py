"""Kills preparing, training, measuring and scoring of a tiny run, and does them again.

    python kill_driver.py FOLDER

A kill is either at a random operation on files, with the file that was being written cut, or at a
random moment. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import py3langid
import tiny
import torch
from killing import KILLED, fork, import_everything

KILLS = {"prepare": 14, "train": 18, "similarity": 8, "score": 8}  # at operations on files
MOMENTS = 6  # SIGKILLs at random moments of all stages together


def work(folder: Path, stages: list[str]) -> None:
    os.chdir(folder)
    for stage in stages:
        tiny.STAGES[stage]()


def outcome(folder: Path, stages: list[str]) -> list[str]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return [tiny.outcome(stage) for stage in stages]
    finally:
        os.chdir(before)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    import_everything()
    py3langid.classify("once, and not in every fork")
    chance, names = random.Random(0), list(tiny.STAGES)
    report: dict[str, Any] = {"kills": 0, "operations": {}, "failed": []}
    before = folder / "before"
    before.mkdir(parents=True)
    tiny.write_corpus(before)
    expected: dict[str, list[str]] = {}

    def compare(run: Path, stages: list[str], what: object) -> None:
        status, _ = fork(partial(work, run, stages))
        leftovers = [path.name for path in run.rglob(".writing-*")]
        wanted = [found for stage in stages for found in expected[stage]]
        if status != 0 or leftovers or outcome(run, stages) != wanted:
            report["failed"].append([what, status, leftovers])

    started = time.perf_counter()
    for stage in names:  # `before` holds what the stages before have left
        whole = folder / f"{stage}-whole"
        shutil.copytree(before, whole)
        status, operations = fork(partial(work, whole, [stage]))
        assert status == 0, stage
        expected[stage] = outcome(whole, [stage])
        report["operations"][stage] = operations
        for number in range(KILLS[stage]):
            run = folder / f"{stage}-{number}"
            shutil.copytree(before, run)
            at = chance.randint(1, operations)
            if fork(partial(work, run, [stage]), at=at, cut=chance.random())[0] != KILLED:
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
            fork(partial(work, run, names), after=chance.random() * duration)
            report["kills"] += 1
        compare(run, names, f"moments {number}")
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
