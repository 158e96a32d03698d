"""Trains a tagger and pretrains an encoder in one, two and three processes.

    python ranks_driver.py FOLDER

FOLDER holds `encoder`, `corpus` and `text.txt`. Processes are forks of this one, so that
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
from typing import Any

import torch
import torch._dynamo  # once, before the processes part
import torch.distributed as dist
import torch.distributed.fsdp

from gradvac.lab.recipes.tagging import TaggingConfig, train_tagging
from gradvac.lab.recipes.tagging.pretraining import PretrainConfig, pretrain
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


def pretraining(folder: Path, run: Path) -> None:
    config = {
        "text": {"prepared": folder / "blocks", "root": folder, "languages": LANGUAGES[:2]}
        | {"sources": ["{lang}.txt"], "dev_share": 0.2},
        "tokenizer": {"size": 120},
        "encoder": {"layers": 1, "width": 16, "heads": 2, "inner": 16, "max_tokens": 16}
        | {"dropout": 0.0},
        "batch": {"rows": 2, "tokens": 12},
        "optimizer": OPTIMIZER,
        "train": TRAIN,
        "align": {"rule": "none"},
    }
    pretrain(PretrainConfig.model_validate(config), run, display=Display(quiet=True))


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
    gaps: dict[str, Any] = {}
    for work, sizes in ((tagging, (1, 2)), (pretraining, (1, 3))):
        runs = [folder / f"{work.__name__}-{size}" for size in sizes]
        for size, into in zip(sizes, runs, strict=True):
            run(size, work, folder, into)
        one, two = (checkpoint.weights(into, "last") for into in runs)
        gaps[work.__name__] = max(float((one[k] - two[k]).abs().max()) for k in one)
    (folder / "gaps.json").write_text(json.dumps(gaps))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
