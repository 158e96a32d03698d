"""Messages for people: what the package logs, as plain lines.

Code says `logger = logging.getLogger(__name__)` and `logger.info(...)`. Without further ado that is
silent, as the log of any library; commands and displays show it:

    with log_to(print):
        train(recipe, settings, "runs/first")
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Write = Callable[[str], object]
_LOGGER = logging.getLogger("gradvac")


class _LineHandler(logging.Handler):
    write: Write | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.write is not None:
            self.write(self.format(record))


_HANDLER = _LineHandler()


@contextmanager
def log_to(write: Write) -> Iterator[None]:
    """Hand every message to `write`, in the place of whoever got them so far.

    So a progress bar inside a command takes the messages over and prints them above itself.
    """
    write_before, level_before = _HANDLER.write, _LOGGER.level
    _HANDLER.write = write
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.addHandler(_HANDLER)  # once, however often it is called
    try:
        yield
    finally:
        _HANDLER.write = write_before
        _LOGGER.setLevel(level_before)
        if write_before is None:
            _LOGGER.removeHandler(_HANDLER)
