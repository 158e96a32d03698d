"""The shared vocabulary."""

from __future__ import annotations

import pytest

from gradvac.nmt.vocabulary import (
    BOS,
    EOS,
    PAD,
    Vocabulary,
    VocabularyConfig,
    learn,
    shares,
    spread,
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
    assert vocabulary.tag("fr") in vocabulary.encode(["<2fr> the dog"])[0]
    assert {vocabulary.tag("en"), vocabulary.tag("fr"), PAD, BOS} <= set(vocabulary.unspeakable)
    assert EOS not in vocabulary.unspeakable


def test_unknown_language_names_the_known_ones(vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="'de' is unknown; this model knows en, fr"):
        vocabulary.tag("de")


def test_a_translation_is_one_line(vocabulary: Vocabulary) -> None:
    newline = vocabulary._pieces.piece_to_id("<0x0A>")
    dog = vocabulary.encode(["dog"])[0]
    assert vocabulary.decode([*dog, newline, *dog]) == "dog dog"


def test_too_small_a_size_says_so() -> None:
    with pytest.raises(ValueError, match=r"data\.vocabulary: SentencePiece could not learn 300"):
        learn([chr(n) + " x" for n in range(200, 400)], ["en"], VocabularyConfig(size=300))


def test_spread_draws_evenly() -> None:
    assert list(spread("abcd", 4, 2)) == ["b", "d"]
    assert list(spread("abcd", 4, 10)) == list("aabbbccddd")
    assert len(list(spread(map(str, range(999)), 999, 100))) == 100


def test_temperature_lifts_small_languages() -> None:
    sizes = {"en": 10_000, "fr": 100}
    flat = shares(sizes, VocabularyConfig(temperature=float("inf")))
    natural = shares(sizes, VocabularyConfig(temperature=1.0))
    assert flat == {"en": 5050, "fr": 5050}
    assert natural == sizes
    assert sum(shares(sizes, VocabularyConfig(max_lines=200, temperature=1.0)).values()) == 200
