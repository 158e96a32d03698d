"""Text that is not in the language its name says is told of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gradvac.lab.languages import default_corpus
from gradvac.lab.recipes.nmt import NmtConfig, open_corpus, prepare_corpus
from gradvac.lab.recipes.nmt.data_warnings import warn_of_languages
from gradvac.utils.hints import log_to

ENGLISH = [f"she said that they would come back {n} days after the war" for n in range(30)]
FRENCH = [f"elle a dit qu'ils reviendraient {n} jours après la guerre" for n in range(30)]
RUSSIAN = [f"она сказала что они вернутся через {n} дней после войны" for n in range(30)]


@pytest.mark.parametrize(
    ("first", "second", "texts", "expected"),
    [
        ("en", "fr", (ENGLISH, FRENCH), None),
        ("en", "fr", (FRENCH, ENGLISH), "the wrong way round"),
        ("fr", "en", (ENGLISH, FRENCH), "the wrong way round"),
        ("en", "ru", (RUSSIAN, ENGLISH), "the wrong way round"),
        ("en", "fr", (ENGLISH, ENGLISH), "'fr' looks like 'en' in 100%"),
        ("en", "fr", (ENGLISH, RUSSIAN), "'fr' looks like 'ru'"),
        ("en", "xx", (FRENCH, ENGLISH), "'xx' looks like 'en'"),
        ("en", "xx", (ENGLISH, FRENCH), None),  # a code that nobody knows may be anything
        ("en", "fr", (FRENCH[:5], ENGLISH[:5]), None),  # too little to say
    ],
)
def test_languages_that_are_not_what_they_are_called(
    first: str, second: str, texts: tuple[list[str], ...], expected: str
) -> None:
    found = warn_of_languages(first, second, list(zip(*texts, strict=True)))
    assert found is None if expected is None else expected in str(found)


@pytest.mark.parametrize("code", ["qso", "qtu", "qnk", "qpp"])
def test_constructed_languages_give_no_warning(code: str) -> None:
    pairs = default_corpus().pairs(code, "dev")[:200]
    assert warn_of_languages("en", code, pairs) is None
    turned = [(right, left) for left, right in pairs]
    assert "the wrong way round" in str(warn_of_languages("en", code, turned))


def test_prepare_says_so_and_training_repeats_it(
    toy_config: Callable[..., NmtConfig], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for split, texts in (
        ("train", (FRENCH, ENGLISH)),
        ("dev", (ENGLISH[:12], FRENCH[:12])),
    ):
        rows = "".join(f"{split} {a}\t{b}\n" for a, b in zip(*texts, strict=True))
        (root / f"{split}.en-fr.tsv").write_text(rows)
    sections = {
        "root": str(root),
        "languages": ["fr"],
        "test": None,
        "limit": {},
        "max_tokens": 200,
    }
    config = toy_config(data={**sections, "cleaning": {"drop_held_out": False}}).data
    for step in (prepare_corpus, prepare_corpus, open_corpus):
        said: list[str] = []
        with log_to(said.append):
            step(config)
        warnings = [line for line in said if line.startswith("warning")]
        assert len(warnings) == 1
        assert "train en-fr" in warnings[0]
