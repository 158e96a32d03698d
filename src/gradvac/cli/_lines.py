"""Lines that a command reads, whatever bytes they hold, and writes, whatever the terminal is."""

import io
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO


class Decoder:
    """Turns lines of bytes into text; what is not UTF-8 is replaced by marks.

    Attributes:
        num_replaced: Lines with such marks so far.
    """

    def __init__(self) -> None:
        self.num_replaced = 0

    def decode(self, lines: Iterable[bytes]) -> Iterator[str]:
        """The lines of a file, with their ends; a byte order mark is not part of the first."""
        for number, raw in enumerate(lines):
            encoding = "utf-8-sig" if number == 0 else "utf-8"
            try:
                yield raw.decode(encoding)
            except UnicodeDecodeError:
                self.num_replaced += 1
                yield raw.decode(encoding, errors="replace")


def utf8_output() -> TextIO:
    """Standard output for what programs read: UTF-8 in any locale.

    Raises:
        ValueError: It is closed.
    """
    if sys.stdout is None:
        raise ValueError("standard output is closed; send it to a file, or to a pipe.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    return sys.stdout


def tolerate_terminal() -> None:
    """Let what a terminal cannot show appear as escapes, instead of ending the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
