"""Fixtures of the constructed languages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gradvac.lab.languages import Corpus, default_corpus, load_corpus


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """The default corpus; what one test generates the others reuse."""
    return default_corpus()


@pytest.fixture
def load_text(tmp_path: Path) -> Callable[[str], Corpus]:
    """Loads a corpus from TOML text."""

    def load(text: str) -> Corpus:
        path = tmp_path / "families.toml"
        path.write_text(text, encoding="utf-8")
        return load_corpus(path)

    return load
