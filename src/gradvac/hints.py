"""Phrases that error messages share: the nearest valid name, and a few of many."""

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str:
    """Suggest the valid name nearest to a wrong one, or list them all."""
    valid = list(valid)
    begun = [one for one in valid if name and one.startswith(name)]  # "lang" for "languages"
    close = begun if len(begun) == 1 else difflib.get_close_matches(name, valid, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(valid)}"


def some(names: Iterable[object], most: int = 5) -> str:
    """The first of some names, and dots if there are more; "nothing" for none."""
    shown = list(dict.fromkeys(map(str, names)))
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "") or "nothing"
