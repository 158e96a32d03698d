"""What to warn of: text that is not what its name says, and test sentences that are in dev.

A warning never changes anything. Languages are guessed by the line, so that a few borrowed
sentences do not decide, and only a clear majority is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import py3langid

from gradvac.lab.recipes.nmt.sealed import read_columns

LINES = 200  # to guess from
_FEWEST_LINES = 10
_CLEAR, _FEW = 0.6, 0.1  # shares of lines
_MANY_SHARED = 0.01  # share of a set to score on that may be in dev without a word
_ALSO = {"no": "nb", "iw": "he", "in": "id", "tl": "fil"}  # other codes of the same language


def of_languages(first: str, second: str, pairs: Sequence[tuple[str, str]]) -> str | None:
    """What is odd about the languages of some pairs; None: nothing.

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


def shared(name: str, scored: Sequence[Path], dev: Sequence[Path]) -> str | None:
    """What a set to score on shares with the one checkpoints are chosen by; None: hardly any.

    Args:
        name: Of the set.
        scored: The two files of its sentence pairs.
        dev: Those of the development set.
    """
    chosen_by = set(read_columns(dev))
    is_shared = [pair in chosen_by for pair in read_columns(scored)]
    if sum(is_shared) < max(1, _MANY_SHARED * len(is_shared)):
        return None
    return (
        f"warning: {sum(is_shared):,} of the {len(is_shared):,} sentence pairs of {name} are in "
        "dev too. Checkpoints are chosen by dev, so scores will be too good."
    )


def sampled(
    pairs: Iterable[tuple[str, str]], sample: list[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Pass pairs on, and keep the first of them to guess from."""
    for pair in pairs:
        if len(sample) < LINES:
            sample.append(pair)
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
