"""Trains a tagger in one, two and three processes.

    python -m tests.tagging.ranks_driver FOLDER

FOLDER holds `encoder` and `corpus`. Writes the largest difference of weights to FOLDER/gaps.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gradvac.lab.recipes.tagging import TaggingConfig, train_tagging
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
        "align": {"rule": "gradvac"},
        "train": TRAIN | {"metric": "dev/loss", "higher_is_better": False},
    }
    train_tagging(TaggingConfig.model_validate(config), run, display=Display(quiet=True))


def main(folder: Path) -> None:
    weights = {}
    for size in (1, 2, 3):
        into = folder / f"run-{size}"
        results = run_ranks(lambda _, into=into: tagging(folder, into), size, folder / "ranks")
        assert not failures(results), failures(results)
        weights[size] = checkpoint.weights(into, "last")
    one = weights.pop(1)
    gaps = {
        size: max(float((one[name] - several[name]).abs().max()) for name in one)
        for size, several in weights.items()
    }
    (folder / "gaps.json").write_text(json.dumps(gaps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
