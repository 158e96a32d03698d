"""Lines that a command writes, whatever the terminal is."""

import io
import sys
from typing import TextIO


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
