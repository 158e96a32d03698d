"""Fixtures of tagging: a tiny random encoder, small tagged corpora, and quick runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gradvac.lab.recipes.tagging import TaggingConfig

from ..shown import Shown
from ..tiny_encoder import save_tiny_encoder

WORDS = {
    "NOUN": ["tree", "river", "stone", "house", "boat"],
    "VERB": ["sees", "builds", "finds", "holds"],
    "ADJ": ["old", "green", "small"],
    "PUNCT": [".", "!"],
}
LANGUAGES = ("aa", "bb", "cc")


def sentence(chance: random.Random, lang: str) -> list[tuple[str, str]]:
    """Adjective, noun, verb, noun in an order of the language, words with its ending."""
    order = {"aa": "ADJ NOUN VERB NOUN", "bb": "NOUN ADJ NOUN VERB", "cc": "VERB NOUN ADJ NOUN"}
    words = [(chance.choice(WORDS[part]) + lang, part) for part in order[lang].split()]
    return [*words, (chance.choice(WORDS["PUNCT"]), "PUNCT")]


def conllu(sentences: list[list[tuple[str, str]]]) -> str:
    """A CoNLL-U file of words and parts of speech."""
    blocks = []
    for number, words in enumerate(sentences):
        lines = [f"# sent_id = {number}"]
        lines += [f"{n}\t{w}\t_\t{t}\t_\t_\t0\t_\t_\t_" for n, (w, t) in enumerate(words, start=1)]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of one layer with a real WordPiece tokenizer, in a folder."""
    folder = tmp_path_factory.mktemp("encoder")
    chance = random.Random(0)
    lines = [
        " ".join(word for word, _ in sentence(chance, lang))
        for lang in LANGUAGES
        for _ in range(200)
    ]
    save_tiny_encoder(folder, lines, size=120)
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pos/LANG/SPLIT.conllu of three languages."""
    root = tmp_path_factory.mktemp("corpus")
    sizes = {"train": 60, "dev": 10, "test": 12}
    for lang in LANGUAGES:
        chance = random.Random(lang)
        (root / "pos" / lang).mkdir(parents=True)
        for split, size in sizes.items():
            text = conllu([sentence(chance, lang) for _ in range(size)])
            (root / "pos" / lang / f"{split}.conllu").write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def settings_in(encoder: Path, corpus: Path) -> Callable[..., TaggingConfig]:
    """A short run's config with its data in a folder; keyword arguments are merged in."""

    def make(folder: Path, **sections: dict[str, Any]) -> TaggingConfig:
        base: dict[str, dict[str, Any]] = {
            "data": {
                "kind": "pos",
                "prepared": folder / "data",
                "root": corpus,
                "languages": list(LANGUAGES),
                "train": "pos/{lang}/train.conllu",
                "dev": "pos/{lang}/dev.conllu",
                "test": "pos/{lang}/test.conllu",
            },
            "model": {"encoder": str(encoder), "max_tokens": 32},
            "batch": {"rows": 12, "epochs": 0.0},
            "align": {"rule": "gradvac"},  # with a state that steps change
            "optimizer": {"lr": 3e-3, "warmup_steps": 2, "schedule": "linear"},
            "train": {
                "max_steps": 8,
                "log_every": 2,
                "record_every": 2,
                "validate_every": 4,
                "checkpoint_every": 4,
                "metric": "dev/f1",
                "higher_is_better": True,
                "device": "cpu",
                "writers": [],
            },
        }
        for name, section in sections.items():
            base[name] = base.get(name, {}) | section
        return TaggingConfig.model_validate(base)

    return make


@pytest.fixture
def settings(
    tmp_path: Path, settings_in: Callable[..., TaggingConfig]
) -> Callable[..., TaggingConfig]:
    """The same in the test's own folder."""
    return partial(settings_in, tmp_path)


@pytest.fixture
def shown() -> Shown:
    return Shown()
