"""Spans from tags, as conlleval reads them; broken tag sequences and their repair.

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

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

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
