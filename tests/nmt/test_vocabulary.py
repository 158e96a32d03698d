"""The shared vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gradvac.lab.recipes.nmt.vocabulary import (
    BOS,
    EOS,
    PAD,
    Vocabulary,
    VocabularyConfig,
    draw_lines,
    learn,
)

LINES = [
    f"the {noun} {verb} {n}"
    for n in range(40)
    for noun in ("dog", "cat")
    for verb in ("runs", "sits")
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(learn(LINES, ["en", "fr"], VocabularyConfig(size=320, threads=1)))


def test_text_comes_back(vocabulary: Vocabulary) -> None:
    lines = [
        "the dog sits 7",
        "un \u00e9l\u00e9phant \U0001f418",
        "\u0939\u093f\u0928\u094d\u0926\u0940",
    ]
    assert [vocabulary.decode(own) for own in vocabulary.encode(lines)] == lines


def test_language_tokens_are_single_and_never_said(vocabulary: Vocabulary) -> None:
    assert vocabulary.languages == ("en", "fr")
    assert {vocabulary.tag("en"), vocabulary.tag("fr"), PAD, BOS} <= set(vocabulary.unspeakable)
    assert EOS not in vocabulary.unspeakable


@pytest.mark.parametrize("text", ["<2fr> the dog", "the dog<2en>", "a <2fr><2en> b", "\uff1c2fr>"])
def test_a_tag_within_a_text_is_text(vocabulary: Vocabulary, text: str) -> None:
    (tokens,) = vocabulary.encode([text])
    assert not {vocabulary.tag("en"), vocabulary.tag("fr")} & set(tokens)
    assert vocabulary.decode(tokens) == text.replace("\uff1c", "<")


def test_unknown_language_names_the_known_ones(vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match=r"'de' .*en, fr"):
        vocabulary.tag("de")


def test_a_translation_is_one_line(vocabulary: Vocabulary) -> None:
    newline = vocabulary._pieces.piece_to_id("<0x0A>")
    dog = vocabulary.encode(["dog"])[0]
    assert vocabulary.decode([*dog, newline, *dog]) == "dog dog"


def test_too_small_a_size_says_so() -> None:
    with pytest.raises(ValueError, match=r"data\.vocabulary: .*300"):
        learn([chr(n) + " x" for n in range(200, 400)], ["en"], VocabularyConfig(size=300))


Texts = Callable[..., dict[str, list[Path]]]


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    """Writes the files of some languages; a string is a file, a letter a line."""

    def write(**languages: list[str]) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for code, contents in languages.items():
            found[code] = [tmp_path / f"{code}{n}" for n in range(len(contents))]
            for path, lines in zip(found[code], contents, strict=True):
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return found

    return write


def drawn(texts: dict[str, list[Path]], **config: float) -> str:
    return "".join(draw_lines(texts, VocabularyConfig.model_validate(config)))


def test_lines_are_drawn_evenly(texts: Texts) -> None:
    assert drawn(texts(en=["abcd"]), max_lines=2) == "bd"
    assert drawn(texts(en=["abcd", "efgh"]), max_lines=4) == "bdfh"
    flat = 1e12  # as good as infinite, which settings refuse
    assert drawn(texts(en=["abcdefgh"], fr=["xy"]), temperature=flat) == "bdegh" + "xxyyy"


def test_temperature_lifts_small_languages(texts: Texts) -> None:
    files = texts(en=["abcdefgh" * 2, "ijklmnop"], fr=["xy"])
    natural = drawn(files, temperature=1.0)
    assert natural == "abcdefghijklmnop" + "xy"
    lifted = drawn(files, temperature=5.0)
    assert len(lifted) == len(natural)
    assert sum(line in "xy" for line in lifted) > 4
    assert len(drawn(files, temperature=1.0, max_lines=9)) == 9


def test_text_of_several_pairs_counts_once(texts: Texts) -> None:
    files = texts(en=["abc", "cab", "bcd"], fr=["wxyz"])
    assert drawn(files, temperature=1.0) == "abcd" + "wxyz"
