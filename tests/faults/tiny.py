"""A translation run of a second: prepared, trained, measured and scored below the current folder.

Paths are relative, so that two runs in two places write the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gradvac.analysis import load_similarities, read_record
from gradvac.lab.recipes.nmt import NmtConfig, prepare_corpus, score_translation, train_translation
from gradvac.lab.recipes.nmt.recipe import measure_translation
from gradvac.lab.runs import PREPARED_METADATA, RunFolder
from gradvac.lab.training import Display, checkpoint, config

WORDS = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu")
RUN = Path("run")


def write_corpus(folder: Path) -> None:
    """Two languages: one says English backwards, one in capitals."""
    draw = random.Random(1)
    lines = sorted({" ".join(draw.choices(WORDS, k=draw.randint(3, 5))) for _ in range(220)})
    draw.shuffle(lines)
    for split, own in (("test", lines[:12]), ("dev", lines[12:24]), ("train", lines[24:])):
        for code, turn in (("xx", lambda t: " ".join(t.split()[::-1])), ("yy", str.upper)):
            rows = [f"{line}\t{turn(line)}\n" for line in own]
            (folder / f"{split}.en-{code}.tsv").write_text("".join(rows), encoding="utf-8")


def settings(**train: Any) -> NmtConfig:
    table: dict[str, Any] = {
        "data": {
            "prepared": "data",
            "languages": ["xx", "yy"],
            "train": "train.{pair}.tsv",
            "dev": "dev.{pair}.tsv",
            "test": "test.{pair}.tsv",
            "max_tokens": 40,
            "vocabulary": {"size": 300, "threads": 1, "character_coverage": 1.0},
        },
        "model": {"size": "tiny", "width": 16, "inner": 16, "heads": 2, "encoder_layers": 1}
        | {"decoder_layers": 1, "dropout": 0.1},
        "batch": {"tokens": 60, "chunk": 2},
        "align": {"rule": "gradvac"},  # with a state that steps change
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "train": {"max_steps": 4, "validate_every": 2, "checkpoint_every": 2, "log_every": 1}
        | {"record_every": 1, "keep": 2, "average_last": 2, "threads": 1, "device": "cpu"}
        | {"writers": []}
        | train,
        "decoding": {"beams": 1, "max_ratio": 0.5, "max_extra": 4},
    }
    return NmtConfig.model_validate_json(json.dumps(table))


def _train() -> None:
    display = Display(Console(file=io.StringIO()), quiet=True)
    train_translation(settings(), RUN, display=display)


STAGES: dict[str, Callable[[], Any]] = {
    "prepare": lambda: prepare_corpus(settings().data),
    "train": _train,
    "similarity": lambda: measure_translation(RUN, granularities=["enc_dec"], num_lines=10),
    "score": lambda: score_translation(RUN, weights="averaged"),
}


def outcome(stage: str, run: Path = RUN) -> str:
    """A hash of everything a stage leaves, apart from what clocks and disks say."""
    found: dict[str, Any] = {}
    if stage == "prepare":
        for path in sorted(Path("data").rglob("*")):
            if path.is_file() and path.suffix not in (".json", ".lock") and path.name != ".lock":
                found[str(path)] = path.read_bytes()
        metadata = json.loads((Path("data") / PREPARED_METADATA).read_text())
        found |= {key: repr(metadata[key]) for key in metadata if key != "stamps"}
    elif stage == "train":
        last = checkpoint.latest(run)
        assert last is not None
        state = {k: v for k, v in last.state().items() if k not in ("meters", "metrics_bytes")}
        found |= _flat(
            {"state": state, "last": last.weights(), "kept": checkpoint.list_checkpoints(run)}
        )
        for name in ("best", "averaged"):
            found |= _flat({name: checkpoint.weights(run, name)})
        record = read_record(run)
        found |= {key: np.asarray(value).tobytes() for key, value in vars(record).items()}
        found["metrics"] = repr([_without_clocks(one) for one in RunFolder(run).read_metrics()])
        later = {"similarity.npz", "scores", ".lock", ".similarity.lock", ".scores.lock"}
        found["files"] = sorted({path.name for path in run.iterdir()} - later)
        found["config"] = config.dump(config.load(NmtConfig, RunFolder(run).config))
        found["signature"] = repr(RunFolder(run).read_signature())
    elif stage == "similarity":
        measured, about = load_similarities(RunFolder(run).similarity)
        found["about"] = about
        for one in measured:
            name = f"{one.granularity} {one.lines}"
            found |= {f"{name} {k}": np.asarray(v).tobytes() for k, v in vars(one).items()}
    else:
        found |= {path.name: path.read_bytes() for path in RunFolder(run).scores.iterdir()}
    text = repr(sorted((key, repr(value)) for key, value in found.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_clocks(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if not re.search("second|memory", key)}


def _flat(value: Any, where: str = "") -> dict[str, Any]:
    if hasattr(value, "numpy"):
        return {where: value.numpy().tobytes()}
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    else:
        return {where: value}
    return {k: v for key, inner in pairs for k, v in _flat(inner, f"{where}/{key}").items()}
