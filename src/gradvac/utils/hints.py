"""Messages for people: the nearest valid name, what to install, whom to warn; the log as lines.

Code says `logger = logging.getLogger(__name__)` and `logger.info(...)`. Without further ado that is
silent, as the log of any library; commands and displays show it:

    with log_to(print):
        train(recipe, settings, "runs/first")
"""

import difflib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

Write = Callable[[str], object]
_LOGGER = logging.getLogger("gradvac")


def nearest(name: str, valid: Iterable[str]) -> str:
    """Suggest the valid name nearest to a wrong one, or list them all."""
    valid = list(valid)
    begun = [one for one in valid if name and one.startswith(name)]  # "lang" for "languages"
    close = begun if len(begun) == 1 else difflib.get_close_matches(name, valid, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(valid)}"


def some(names: Iterable[object], most: int = 5) -> str:
    """The first of some names, and how many more there are; "nothing" for none."""
    shown = list(dict.fromkeys(map(str, names)))
    more = f" and {len(shown) - most:,} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more or "nothing"


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


class _LineHandler(logging.Handler):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))


@contextmanager
def log_to(write: Write) -> Iterator[None]:
    """Hand every message to `write`, in the place of whoever got them so far.

    So a progress bar inside a command takes the messages over and prints them above itself.
    """
    handlers, level = _LOGGER.handlers, _LOGGER.level
    others = [one for one in handlers if not isinstance(one, _LineHandler)]
    _LOGGER.handlers = [*others, _LineHandler(write)]
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOGGER.handlers = handlers
        _LOGGER.setLevel(level)
