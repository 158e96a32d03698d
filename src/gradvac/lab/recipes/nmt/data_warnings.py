"""The wrong language and sets that overlap: warnings about data, and a score of translations.

Languages are guessed by the line, so that a few borrowed sentences do not decide, and only a clear
majority is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import py3langid
from numpy.typing import NDArray

from gradvac.lab.languages.real import find
from gradvac.lab.recipes.nmt.readers import Pair

_LINES_GUESSED, _FEWEST_LINES = 200, 10  # to guess a language from
_CLEAR, _FEW = 0.6, 0.1  # shares of lines
_MANY_SHARED = 0.01  # share of a set to score on that may be in dev without a warning
_ALSO = {"nb": "no", "iw": "he", "in": "id", "fil": "tl"}  # other codes of the same language


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


def in_other_languages(lines: Sequence[str], code: str) -> NDArray[np.bool_] | None:
    """Which lines look like another language, `[N]`; empty ones look like none.

    The guess is among all 140 languages that py3langid knows, whatever a run was trained on, so
    that numbers of different runs can be compared. It errs with short lines and close relatives.

    Returns:
        None if the guesser does not know that language, as it knows no constructed one.
    """
    name = _label(code)
    if name not in _known():
        return None
    return np.array([bool(one.strip()) and py3langid.classify(one)[0] != name for one in lines])


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
    """What the guesser calls a language, by any of its codes."""
    language = find(code)
    base = code.partition("_")[0].lower() if language is None else language.code
    return _ALSO.get(base, base)
