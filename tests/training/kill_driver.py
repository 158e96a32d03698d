"""Kills trainings of the toy recipe and continues them; prints what came of it as JSON.

    python kill_driver.py FOLDER

Deaths are at each operation on files that saving consists of, half-written files included, and at
random moments.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from killing import KILLED, SAVING, fork, import_everything
from toy import ToyConfig, ToyRecipe, outcome

from gradvac.analysis import read_record
from gradvac.lab.training import Display, train

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


def work(run: Path) -> None:
    config = ToyConfig.model_validate(SETTINGS)
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        train(ToyRecipe(config), config, run, display=Display(quiet=True))


def digest(run: Path) -> str:
    """Of everything a run ends with, its record of alignments included."""
    record = {key: np.asarray(value).tobytes() for key, value in vars(read_record(run)).items()}
    found = outcome(run) | record
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    import_everything()
    started = time.perf_counter()
    status, num_operations = fork(partial(work, folder / "whole"), operations=SAVING)
    duration = time.perf_counter() - started
    expected = digest(folder / "whole")
    report: dict[str, Any] = {"status": status, "operations": num_operations, "failed": []}

    def finish(run: Path, what: object) -> None:
        status, _ = fork(partial(work, run))
        leftovers = [path.name for path in run.rglob(".writing-*")]
        if status != 0 or leftovers or digest(run) != expected:
            report["failed"].append([what, status, leftovers])

    for operation in range(1, num_operations + 1):
        run = folder / f"operation-{operation}"
        killed, _ = fork(partial(work, run), operations=SAVING, at=operation)
        if killed != KILLED:
            report["failed"].append([operation, killed, "was not killed"])
        finish(run, operation)
    chance = random.Random(0)
    for number in range(4):
        run = folder / f"moment-{number}"
        for _ in range(3):  # the same run, killed again and again
            fork(partial(work, run), after=chance.random() * duration)
        finish(run, f"moment {number}")
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
