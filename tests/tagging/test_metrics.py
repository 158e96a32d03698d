"""Spans and F1: hand cases, and seqeval on random tag sequences."""

from __future__ import annotations

import random
import warnings

import pytest

from gradvac.lab.recipes.tagging.metrics import (
    Span,
    count_broken,
    count_spans,
    find_spans,
    find_strict_spans,
    repair,
    score_tags,
    xtreme_units,
)
from gradvac.lab.recipes.tagging.settings import UNIVERSAL_TAGS

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]
UPOS = sorted(UNIVERSAL_TAGS)


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize(
    ("tags", "found", "strict"),
    [
        ("B-PER I-PER O", [("PER", 0, 1)], [("PER", 0, 1)]),
        ("B-PER B-PER", [("PER", 0, 0), ("PER", 1, 1)], [("PER", 0, 0), ("PER", 1, 1)]),
        ("I-PER I-PER O B-LOC", [("PER", 0, 1), ("LOC", 3, 3)], [("LOC", 3, 3)]),
        ("O I-LOC", [("LOC", 1, 1)], []),
        ("B-PER I-LOC I-LOC", [("PER", 0, 0), ("LOC", 1, 2)], [("PER", 0, 0)]),
        ("B-PER I-LOC I-PER", [("PER", 0, 0), ("LOC", 1, 1), ("PER", 2, 2)], [("PER", 0, 0)]),
        ("B-PER O I-PER", [("PER", 0, 0), ("PER", 2, 2)], [("PER", 0, 0)]),
        ("O O", [], []),
        ("", [], []),
    ],
)
def test_both_readings_by_hand(
    tags: str, found: list[tuple[str, int, int]], strict: list[tuple[str, int, int]]
) -> None:
    assert find_spans(words(tags)) == [Span(*one) for one in found]
    assert find_strict_spans(words(tags)) == [Span(*one) for one in strict]


def test_a_type_may_hold_a_hyphen() -> None:
    assert find_spans(["B-geo-loc", "I-geo-loc"]) == [Span("geo-loc", 0, 1)]


@pytest.mark.parametrize("names", ["BIES", "BILU"])
def test_other_schemes_become_iob2(names: str) -> None:
    """Ends and single words; two single ones side by side stay two. What is no tag stays."""
    begin, inside, last, single = names
    given = [f"{begin}-geo-loc", f"{inside}-geo-loc", f"{last}-geo-loc", "O"]
    given += [f"{single}-PER", f"{single}-PER", f"{last}-PER", "PER", f"{inside}-", "X-PER"]
    assert repair(given) == [
        *("B-geo-loc", "I-geo-loc", "I-geo-loc", "O"),
        *("B-PER", "B-PER", "B-PER", "PER", "I-", "X-PER"),
    ]


def test_repair_by_hand() -> None:
    broken = words("I-PER I-PER O I-LOC B-LOC I-PER")
    assert repair(broken) == words("B-PER I-PER O B-LOC B-LOC B-PER")
    assert count_broken(broken) == 3
    assert count_broken(repair(broken)) == 0


def random_sentences(tags: list[str], seed: int) -> list[list[str]]:
    chance = random.Random(seed)
    return [[chance.choice(tags) for _ in range(1 + n % 12)] for n in range(300)]


@pytest.mark.parametrize("seed", range(3))
def test_repair_keeps_the_reading_and_makes_both_agree(seed: int) -> None:
    for tags in random_sentences(TAGS, seed):
        assert find_strict_spans(repair(tags)) == find_spans(tags)


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_seqeval_in_both_modes(seed: int) -> None:
    """Its default mode is a port of conlleval; its strict mode is IOB2 to the letter."""
    from seqeval.metrics import f1_score, precision_score, recall_score
    from seqeval.scheme import IOB2

    gold, predicted = random_sentences(TAGS, seed), random_sentences(TAGS, seed + 100)
    score = score_tags(gold, predicted, "ner")
    assert score.f1 == pytest.approx(100 * f1_score(gold, predicted))
    assert score.precision == pytest.approx(100 * precision_score(gold, predicted))
    assert score.recall == pytest.approx(100 * recall_score(gold, predicted))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own, about types without a prediction
        strict = f1_score(gold, predicted, mode="strict", scheme=IOB2)
    assert score.strict_f1 == pytest.approx(100 * strict)
    assert score.num_broken > 0


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_xtreme_on_parts_of_speech(seed: int) -> None:
    """XTREME's seqeval takes the first letter for the prefix and the whole tag for the type."""
    from seqeval.metrics import f1_score

    gold, predicted = random_sentences(UPOS, seed), random_sentences(UPOS, seed + 100)
    marked = [[[f"{tag[0]}-{tag}" for tag in tags] for tags in side] for side in (gold, predicted)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these are no prefixes, which XTREME does not mind
        expected = f1_score(*marked)
    assert 0 < expected < 1
    assert score_tags(gold, predicted, "pos").f1 == pytest.approx(100 * expected)


def test_runs_of_equal_tags_count_once_in_xtremes_f1() -> None:
    gold = [words("DET NOUN NOUN VERB SYM SYM")]
    assert xtreme_units(gold[0]) == [
        Span("DET", 0, 0),
        Span("NOUN", 1, 2),
        Span("VERB", 3, 3),
        Span("SYM", 4, 4),
        Span("SYM", 5, 5),
    ]
    score = score_tags(gold, [words("DET NOUN ADJ VERB SYM SYM")], "pos")
    assert score.accuracy == pytest.approx(100 * 5 / 6)
    assert score.f1 == pytest.approx(100 * 2 * 4 / (6 + 5))


def test_conllevals_example_by_hand() -> None:
    gold = [words("B-PER I-PER O B-LOC"), words("O B-ORG")]
    predicted = [words("B-PER O O I-LOC"), words("B-ORG B-ORG")]
    assert count_spans(gold, predicted, find_spans).tolist() == [[1, 2, 2], [1, 2, 1]]
    score = score_tags(gold, predicted, "ner")
    assert (score.precision, score.recall) == (pytest.approx(50), pytest.approx(200 / 3))
    assert score.accuracy == pytest.approx(100 * 3 / 6)
    assert score.num_broken == 1
    assert score.strict_f1 == pytest.approx(100 * 2 * 1 / (3 + 3))


def test_nothing_predicted_is_zero_not_an_error() -> None:
    score = score_tags([words("B-PER O")], [words("O O")], "ner")
    assert (score.f1, score.precision, score.recall, score.accuracy) == (0, 0, 0, 50)


@pytest.mark.parametrize(
    ("gold", "predicted", "said"),
    [
        ([["O"]], [], "0 sentences"),
        ([["O", "O"]], [["O"]], "sentence 1 .*2 words"),
        ([[]], [[]], "no word"),
    ],
)
def test_what_cannot_be_scored(
    gold: list[list[str]], predicted: list[list[str]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        score_tags(gold, predicted, "ner")
