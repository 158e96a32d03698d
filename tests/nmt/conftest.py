"""Fixtures of translation: small corpora on disk, tiny models, and the real data if present."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from gradvac.lab.recipes.nmt import (
    Batch,
    NmtConfig,
    Ragged,
    Size,
    Transformer,
    make_batch,
    prepare_corpus,
    train_translation,
)
from gradvac.lab.training import Display

from .. import needs

WORDS = ["ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu"]
TINY = Size(width=16, inner=32, heads=2, encoder_layers=2, decoder_layers=2)


@pytest.fixture
def tiny_model() -> Callable[..., Transformer]:
    """Builds a tiny model in float64, the same one for the same arguments."""

    def build(vocabulary_size: int = 50, seed: int = 0, **options: Any) -> Transformer:
        torch.manual_seed(seed)
        return Transformer(TINY, vocabulary_size, **{"dropout": 0.0, **options}).double()

    return build


@pytest.fixture
def random_batch() -> Callable[..., Batch]:
    """Builds a batch of three tasks with sentences of random or equal length."""

    def build(*, packed: bool, equal: bool = False, seed: int = 0, vocabulary: int = 50) -> Batch:
        draw = np.random.default_rng(seed)
        tasks = [0] * 5 + [1] * 3 + [2] * 4

        def sentences(longest: int) -> Ragged:
            lengths = [longest if equal else draw.integers(1, longest) for _ in tasks]
            return Ragged.of([draw.integers(4, vocabulary, length) for length in lengths])

        sources, targets = (
            sentences(8).add_special_tokens(3, 2),
            sentences(7).add_special_tokens(1, 2),
        )
        return make_batch(sources, targets, tasks, packed=packed)

    return build


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy corpus: "xx" says English backwards, "yy" word by word in another alphabet."""
    folder = tmp_path_factory.mktemp("toy")
    draw = random.Random(0)
    english = {" ".join(draw.choices(WORDS, k=draw.randint(3, 6))) for _ in range(2500)}
    lines = sorted(english)
    draw.shuffle(lines)
    parts = {"test": lines[:60], "dev": lines[60:120], "train": lines[120:]}
    other = {word: word[::-1].upper() for word in WORDS}
    for split, own in parts.items():
        backwards = [" ".join(reversed(line.split())) for line in own]
        _write(folder / f"{split}.en-xx.tsv", map("\t".join, zip(own, backwards, strict=True)))
        _write(folder / f"{split}.en", own)
        _write(folder / f"{split}.yy", [" ".join(other[w] for w in line.split()) for line in own])
    for split in parts:
        names = (f"{split}.en", f"{split}.yy")
        columns = [(folder / name).read_text(encoding="utf-8").splitlines() for name in names]
        _write(folder / f"{split}.en-yy.tsv", map("\t".join, zip(*columns, strict=True)))
    return folder


def _write(path: Path, lines: Sequence[str] | Any) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def make_config(root: Path, prepared: Path, sections: dict[str, dict[str, Any]]) -> NmtConfig:
    table: dict[str, dict[str, Any]] = {
        "data": {
            "prepared": str(prepared),
            "root": str(root),
            "languages": ["xx", "yy"],
            "train": "train.{pair}.tsv",
            "dev": "dev.{pair}.tsv",
            "test": "test.{pair}.tsv",
            "max_tokens": 20,
            "limit": {"yy": 300},
            "resource_levels": {"high": 1000, "medium": 500, "low": 100},
            "vocabulary": {"size": 300, "threads": 1, "character_coverage": 1.0},
        },
        "model": {"size": "tiny", "dropout": 0.0, "label_smoothing": 0.0},
        "batch": {"tokens": 300, "chunk": 4},
        "align": {"rule": "gradvac"},  # with a state that steps change
        "optimizer": {"lr": 4e-3, "warmup_steps": 30, "schedule": "linear"},
        "train": {
            "max_steps": 8,
            "validate_every": 8,
            "checkpoint_every": 8,
            "log_every": 4,
            "threads": 1,
            "device": "cpu",
            "writers": [],
        },
        "decoding": {"beams": 2},
    }
    for name, changes in sections.items():
        table.setdefault(name, {}).update(changes)
    return NmtConfig.model_validate_json(json.dumps(table))


@pytest.fixture
def toy_config(toy_folder: Path, tmp_path: Path) -> Callable[..., NmtConfig]:
    """Builds the config of a run on the toy corpus that takes seconds; sections may be changed."""

    def build(**sections: dict[str, Any]) -> NmtConfig:
        return make_config(toy_folder, tmp_path / "prepared", sections)

    return build


@pytest.fixture(scope="session")
def toy_prepared(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What preparing the toy corpus makes, with the usual settings."""
    folder = tmp_path_factory.mktemp("prepared") / "toy"
    prepare_corpus(make_config(toy_folder, folder, {}).data)
    return folder


@pytest.fixture
def is_prepared(toy_prepared: Path, tmp_path: Path) -> None:
    """The data of `toy_config` are there, for tests that are not about preparing them."""
    shutil.copytree(toy_prepared, tmp_path / "prepared")


@pytest.fixture(scope="session")
def toy_run(toy_folder: Path, made_once: Callable[..., Path]) -> Path:
    """A run that has learned the toy languages, with GradVac."""
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "limit": {},
            "vocabulary": {"size": 400, "threads": 1, "character_coverage": 1.0},
        },
        "train": {
            "max_steps": 400,
            "validate_every": 200,
            "checkpoint_every": 200,
            "keep": 2,
            "average_last": 2,
        },
    }

    def learn(folder: Path) -> None:
        config = make_config(toy_folder, folder / "prepared", sections)
        quiet = Display(Console(file=io.StringIO()), quiet=True)
        train_translation(config, folder / "run", display=quiet)

    return made_once("learned", learn) / "run"


@pytest.fixture
def quiet() -> Display:
    """A display that shows nothing, and remembers messages in `console.file`."""
    return Display(Console(file=io.StringIO(), width=200), quiet=True)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data; tests that need it are skipped where it is absent."""
    return needs.real_data("mt")
