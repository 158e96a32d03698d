"""Fixtures of the constructed languages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gradvac.lab import languages as corpora


@pytest.fixture(scope="session")
def corpus() -> corpora.Corpus:
    """The default corpus; what one test generates the others reuse."""
    return corpora.default()


@pytest.fixture
def load_text(tmp_path: Path) -> Callable[[str], corpora.Corpus]:
    """Loads a corpus from TOML text."""

    def load(text: str) -> corpora.Corpus:
        path = tmp_path / "families.toml"
        path.write_text(text, encoding="utf-8")
        return corpora.load(path)

    return load
