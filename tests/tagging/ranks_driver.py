"""Trains a tagger and pretrains an encoder in one, two and three processes.

    python -m tests.tagging.ranks_driver FOLDER

FOLDER holds `encoder`, `corpus` and `text.txt`. Writes the largest difference of weights to
FOLDER/gaps.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gradvac.lab.recipes.tagging import TaggingConfig, train_tagging
from gradvac.lab.recipes.tagging.pretraining import PretrainConfig, pretrain
from gradvac.lab.training import Display, checkpoint

from ..ranks import failures, run_ranks

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


def main(folder: Path) -> None:
    gaps: dict[str, Any] = {}
    for work, sizes in ((tagging, (1, 2)), (pretraining, (1, 3))):
        runs = [folder / f"{work.__name__}-{size}" for size in sizes]
        for size, into in zip(sizes, runs, strict=True):
            results = run_ranks(
                lambda _, work=work, into=into: work(folder, into), size, folder / "ranks"
            )
            assert not failures(results), failures(results)
        one, two = (checkpoint.weights(into, "last") for into in runs)
        gaps[work.__name__] = max(float((one[k] - two[k]).abs().max()) for k in one)
    (folder / "gaps.json").write_text(json.dumps(gaps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
