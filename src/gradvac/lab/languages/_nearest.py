"""Suggestions for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(key: str, valid: Iterable[str]) -> str:
    """The valid key nearest to a wrong one, as a suggestion; a list of all if none is near."""
    valid = list(valid)
    close = difflib.get_close_matches(key, valid, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(valid)}"
