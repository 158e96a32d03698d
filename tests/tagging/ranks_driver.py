"""Trains a tagger in one, two and three processes.

    python ranks_driver.py FOLDER

FOLDER holds `encoder` and `corpus`. Processes are forks of this one, so that
everything is imported once. Writes the largest difference of weights to FOLDER/gaps.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # once, before the processes part
import torch.distributed as dist
import torch.distributed.fsdp

from gradvac.lab.recipes.tagging import TaggingConfig, train_tagging
from gradvac.lab.training import Display, checkpoint

TRAIN = {"max_steps": 6, "validate_every": 3, "checkpoint_every": 3, "log_every": 3} | {
    "device": "cpu",
    "writers": [],
    "threads": 1,
}
OPTIMIZER = {"lr": 1e-3, "warmup_steps": 2, "eps": 1e-4}  # see tests/torchrun: no noise
LANGUAGES = ["aa", "bb", "cc"]


def tagging(folder: Path, run: Path) -> None:
    config = {
        "data": {"kind": "pos", "prepared": folder / "data", "root": folder / "corpus"}
        | {"languages": LANGUAGES}
        | {split: f"pos/{{lang}}/{split}.conllu" for split in ("train", "dev", "test")},
        "model": {"encoder": str(folder / "encoder"), "max_tokens": 32, "dropout": 0.0},
        "batch": {"rows": 12, "epochs": 0.0},
        "sampling": {"slots": 4},
        "optimizer": OPTIMIZER,
        "train": TRAIN | {"metric": "dev/loss", "higher_is_better": False},
    }
    train_tagging(TaggingConfig.model_validate(config), run, display=Display(quiet=True))


def run(size: int, work: Callable[[Path, Path], None], folder: Path, into: Path) -> None:
    """Work in so many processes."""

    def one(rank: int) -> None:
        if size > 1:
            where = f"file://{into}.meeting"
            dist.init_process_group("gloo", where, timedelta(seconds=60), size, rank)
        work(folder, into)
        os._exit(0)

    context = multiprocessing.get_context("fork")
    started = [context.Process(target=one, args=(rank,)) for rank in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join(90)
        assert process.exitcode == 0, f"{work.__name__} in {size}: {process.exitcode}"


def main(folder: Path) -> None:
    weights = {}
    for size in (1, 2, 3):
        run(size, tagging, folder, folder / f"run-{size}")
        weights[size] = checkpoint.weights(folder / f"run-{size}", "last")
    one = weights.pop(1)
    gaps = {
        size: max(float((one[name] - several[name]).abs().max()) for name in one)
        for size, several in weights.items()
    }
    (folder / "gaps.json").write_text(json.dumps(gaps))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
