"""Scores of tags: spans as conlleval reads them, precision, recall, F1, accuracy; broken tags.

In IOB2 every entity starts with `B-X` and continues with `I-X`. Models (and some files) break
this rule. Such a sentence can then be read in two ways, and both are offered:

- `find_spans` is conlleval's reading: an `I-X` that continues nothing (after `O`, at the
  beginning, or after an entity of another type) starts an entity.
- `find_strict_spans` is IOB2 to the letter: such an `I-X` is not part of any entity.

`repair` turns the first reading into clean IOB2: the `I-X` that starts an entity becomes `B-X`. It
reads IOB1 and IOBES (BILOU) too, whose marks of ends and of single words become `I-` and `B-`.

XTREME scores part-of-speech tags with the same program, which was made for spans: it takes the
first letter of a tag for the prefix. `xtreme_units` does the same, with all that follows from it.
"""

# N sentences

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from gradvac.lab.runs.counts import Counts, f1, percentage

Kind = Literal["ner", "pos"]
Tags = Sequence[str]
OUTSIDE = "O"
OTHER_PREFIXES = ("E-", "S-", "L-", "U-")  # of IOBES, and what BILOU calls them
_IS_TAG = re.compile("[BIESLU]-.")
_IOBES = {"L-": "E-", "U-": "S-"}


class Span(NamedTuple):
    """Words `first` to `last`, both included, of one type."""

    type: str
    first: int
    last: int


def find_spans(tags: Sequence[str]) -> list[Span]:
    """The entities of a sentence as conlleval reads them."""
    return list(_chunks(map(_split, tags)))


def find_strict_spans(tags: Sequence[str]) -> list[Span]:
    """The entities of a sentence as IOB2 defines them: without a `B-` there is none."""
    spans: list[Span] = []
    is_open = False
    for place, (prefix, kind) in enumerate(map(_split, tags)):
        if prefix == "B":
            spans.append(Span(kind, place, place))
        elif prefix == "I" and is_open and spans[-1].type == kind:
            spans[-1] = spans[-1]._replace(last=place)
        else:
            is_open = False
            continue
        is_open = True
    return spans


def xtreme_units(tags: Sequence[str]) -> list[Span]:
    """What XTREME counts in a sentence of part-of-speech tags.

    A run of equal tags is one unit, right only as a whole. `SCONJ` and `SYM` are an exception: they
    begin with S, which marks a unit of one word.
    """
    return list(_chunks((tag[:1], tag) for tag in tags))


def repair(tags: Sequence[str]) -> list[str]:
    """Clean IOB2 with the same entities in conlleval's reading; other tags stay."""
    known = [tag if _IS_TAG.match(tag) else OUTSIDE for tag in tags]
    clean = list(tags)
    for span in find_spans([_IOBES.get(tag[:2], tag[:2]) + tag[2:] for tag in known]):
        clean[span.first] = f"B-{span.type}"
        for place in range(span.first + 1, span.last + 1):
            clean[place] = f"I-{span.type}"
    return clean


def count_broken(tags: Sequence[str]) -> int:
    """How many tags `repair` would change."""
    return sum(old != new for old, new in zip(tags, repair(tags), strict=True))


def _split(tag: str) -> tuple[str, str]:
    prefix, _, kind = tag.partition("-")
    return prefix, kind


def _chunks(tags: Iterable[tuple[str, str]]) -> Iterator[Span]:
    """Chunks of (prefix, type), by conlleval's rules for where one ends and another starts."""
    before, kind_before, first = OUTSIDE, "", 0
    place = -1
    for place, (prefix, kind) in enumerate(tags):
        if before != OUTSIDE and _ends(before, prefix, kind_before, kind):
            yield Span(kind_before, first, place - 1)
        if _starts(before, prefix, kind_before, kind):
            first = place
        before, kind_before = prefix, kind
    if before != OUTSIDE:
        yield Span(kind_before, first, place)


def _ends(before: str, now: str, kind_before: str, kind: str) -> bool:
    return (
        before in ("E", "S")
        or (before in ("B", "I") and now in ("B", "S", OUTSIDE))
        or kind_before != kind
    )


def _starts(before: str, now: str, kind_before: str, kind: str) -> bool:
    return (
        now in ("B", "S")
        or (before in ("E", "S", OUTSIDE) and now in ("E", "I"))
        or (now != OUTSIDE and kind_before != kind)
    )


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
    sums = {metric: of_metric.sum(0).astype(np.float64) for metric, of_metric in counts.items()}
    spans = sums["F1"]  # correct, predicted, gold
    return TagScore(
        f1=float(f1(spans)),
        precision=float(percentage(spans[[0, 1]])),
        recall=float(percentage(spans[[0, 2]])),
        accuracy=float(percentage(sums["accuracy"])),
        strict_f1=float(f1(sums.get("strict F1", spans))),
        num_broken=sum(map(count_broken, predicted)) if kind == "ner" else 0,
        num_sentences=len(gold),
        num_words=int(sums["accuracy"][1]),
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
