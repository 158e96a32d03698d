"""Warnings about data, which change nothing: the wrong language, sets that overlap.

Languages are guessed by the line, so that a few borrowed sentences do not decide, and only a clear
majority is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import py3langid

from gradvac.lab.recipes.nmt.readers import Pair

_LINES_GUESSED, _FEWEST_LINES = 200, 10  # to guess a language from
_CLEAR, _FEW = 0.6, 0.1  # shares of lines
_MANY_SHARED = 0.01  # share of a set to score on that may be in dev without a warning
_ALSO = {"no": "nb", "iw": "he", "in": "id", "tl": "fil"}  # other codes of the same language


def warn_of_languages(first: str, second: str, pairs: Sequence[Pair]) -> str | None:
    """A warning if some pairs are not in the languages they are named after; None: they are.

    Args:
        first: Code of the language on the left, as named.
        second: Code of the language on the right.
        pairs: Lines to look at.
    """
    if len(pairs) < _FEWEST_LINES:
        return None
    names = [_label(first), _label(second)]
    shares = [_shares(column) for column in zip(*pairs, strict=True)]
    for here, there in ((0, 1), (1, 0)):
        if shares[here][names[there]] >= _CLEAR and shares[there][names[there]] < _FEW:
            return (
                f"what is called {(first, second)[here]!r} looks like {(first, second)[there]!r}: "
                "the two languages may be the wrong way round. data.columns, or a header, says "
                "which column is which."
            )
    for code, name, column_shares in zip((first, second), names, shares, strict=True):
        guess, share = max(column_shares.items(), key=lambda item: item[1])
        if name in _known() and column_shares[name] < _FEW and share >= _CLEAR:
            return f"what is called {code!r} looks like {guess!r} in {share:.0%} of the lines."
    return None


def warn_of_overlap(name: str, scored: Iterable[Pair], dev: Iterable[Pair]) -> str | None:
    """A warning if a set to score on shares pairs with the development set; None: hardly any."""
    chosen_by = set(dev)
    is_shared = [pair in chosen_by for pair in scored]
    if sum(is_shared) < max(1, _MANY_SHARED * len(is_shared)):
        return None
    return (
        f"warning: {sum(is_shared):,} of the {len(is_shared):,} sentence pairs of {name} are in "
        "dev too. Checkpoints are chosen by dev, so scores will be too good."
    )


def keep_first(pairs: Iterable[Pair], first: list[Pair]) -> Iterator[Pair]:
    """Pass pairs on, and keep the first of them, to guess languages from."""
    for pair in pairs:
        if len(first) < _LINES_GUESSED:
            first.append(pair)
        yield pair


def _shares(lines: Sequence[str]) -> Counter[str]:
    """Language -> share of the lines that look like it."""
    counts = Counter(py3langid.classify(line)[0] for line in lines)
    return Counter({code: count / len(lines) for code, count in counts.items()})


def _known() -> set[str]:
    return {label for label, _ in py3langid.rank("")}


def _label(code: str) -> str:
    base = code.partition("_")[0].lower()
    return _ALSO.get(base, base)
