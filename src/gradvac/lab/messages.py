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
