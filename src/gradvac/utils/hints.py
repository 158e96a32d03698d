"""What messages share: the nearest valid name, a few of many, what to install, whom to warn."""

import difflib
import sys
import warnings
from collections.abc import Iterable
from types import FrameType


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


def install_line(*extras: str) -> str:
    """How to install what some extras need: from a checkout, as no index has the package."""
    return f'pip install ".[{",".join(extras)}]" in the checkout of gradvac'


def warn_caller(message: str) -> None:
    """Warn at the line that called gradvac, however deep inside of it this is."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and _package(frame) in ("gradvac", "torch", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
