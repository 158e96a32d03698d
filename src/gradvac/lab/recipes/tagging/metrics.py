"""Precision, recall and F1 of spans, and accuracy of words: one language's score."""

# N sentences

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gradvac.lab.recipes.tagging.spans import (
    Span,
    count_broken,
    find_spans,
    find_strict_spans,
    xtreme_units,
)
from gradvac.lab.runs.sentences import Counts

Kind = Literal["ner", "pos"]
Tags = Sequence[str]


@dataclass(frozen=True)
class SpanCounts:
    """Spans counted over all sentences of a set: precision, recall and F1 in percent."""

    correct: int
    predicted: int
    gold: int

    @property
    def precision(self) -> float:
        """Share of predicted spans that are correct; 0 without any, as in conlleval."""
        return 100 * self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of gold spans that were found; 0 without any."""
        return 100 * self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of the two."""
        total = self.predicted + self.gold
        return 200 * self.correct / total if total else 0.0


@dataclass(frozen=True)
class TagScore:
    """The score of one language.

    Attributes:
        f1: In percent. NER: conlleval's, over entities. POS: XTREME's, over runs of equal tags.
        precision: Precision of the same spans.
        recall: Recall of the same spans.
        accuracy: Words with the correct tag, in percent.
        strict_f1: NER: F1 where predictions that break IOB2 are not entities. POS: the same as
            `f1`, as there is nothing to break.
        num_broken: Predicted tags that break IOB2.
        num_sentences: Sentences scored.
        num_words: Words scored.
    """

    f1: float
    precision: float
    recall: float
    accuracy: float
    strict_f1: float
    num_broken: int
    num_sentences: int
    num_words: int


def count_spans(
    gold: Sequence[Tags], predicted: Sequence[Tags], read: Callable[[Tags], list[Span]]
) -> Counts:
    """Count the spans of every sentence: correct in type, first and last word; predicted; gold.

    Returns:
        `[N, 3]`.
    """
    rows = []
    for true, guess in zip(gold, predicted, strict=True):
        there, found = set(read(true)), set(read(guess))
        rows.append((len(there & found), len(found), len(there)))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def count_words(gold: Sequence[Tags], predicted: Sequence[Tags]) -> Counts:
    """Count the words of every sentence: those with the correct tag; all, `[N, 2]`."""
    pairs = zip(gold, predicted, strict=True)
    rows = [(sum(map(str.__eq__, true, guess)), len(true)) for true, guess in pairs]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def count_all(gold: Sequence[Tags], predicted: Sequence[Tags], kind: Kind) -> dict[str, Counts]:
    """Metric -> the counts of every sentence that it is computed from."""
    counts = {
        "F1": count_spans(gold, predicted, find_spans if kind == "ner" else xtreme_units),
        "accuracy": count_words(gold, predicted),
    }
    if kind == "ner":
        counts["strict F1"] = count_spans(gold, predicted, find_strict_spans)
    return counts


def score_tags(gold: Sequence[Tags], predicted: Sequence[Tags], kind: Kind) -> TagScore:
    """Score predicted tags.

    Args:
        gold: The tags of every sentence.
        predicted: As many tags for every sentence.
        kind: "ner" reads tags as IOB2, "pos" as parts of speech.

    Raises:
        ValueError: Sentences or words do not match, or there is no word at all.
    """
    _check(gold, predicted)
    counts = count_all(gold, predicted, kind)
    plain = SpanCounts(*counts["F1"].sum(0).tolist())
    strict = SpanCounts(*counts["strict F1"].sum(0).tolist()) if kind == "ner" else plain
    num_right, num_words = counts["accuracy"].sum(0).tolist()
    return TagScore(
        f1=plain.f1,
        precision=plain.precision,
        recall=plain.recall,
        accuracy=100 * num_right / num_words,
        strict_f1=strict.f1,
        num_broken=sum(map(count_broken, predicted)) if kind == "ner" else 0,
        num_sentences=len(gold),
        num_words=num_words,
    )


def _check(gold: Sequence[Tags], predicted: Sequence[Tags]) -> None:
    if len(gold) != len(predicted):
        raise ValueError(
            f"predicted: has {len(predicted):,} sentences, but there are {len(gold):,}; give one "
            "prediction for each."
        )
    for number, (true, guess) in enumerate(zip(gold, predicted, strict=True), start=1):
        if len(true) != len(guess):
            raise ValueError(
                f"predicted: sentence {number:,} has {len(guess)} tags for {len(true)} words; give "
                "one tag per word."
            )
    if not any(gold):
        raise ValueError("gold: has no word at all; there is nothing to score.")
