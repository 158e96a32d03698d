"""Output in any locale: UTF-8 for programs, escapes for people."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from gradvac.cli.common import tolerate_terminal, utf8_output


@pytest.fixture
def ascii_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], io.BytesIO]:
    """Puts a standard output in place that knows only ASCII, and gives what it gets.

    In the test itself: pytest has another standard output for what comes before.
    """
    received = io.BytesIO()
    terminal = io.TextIOWrapper(received, encoding="ascii")

    def start() -> io.BytesIO:
        monkeypatch.setattr(sys, "stdout", terminal)
        return received

    return start


def test_what_programs_read_is_utf8(ascii_only: Callable[[], io.BytesIO]) -> None:
    terminal = ascii_only()
    print("été 狗", file=utf8_output(), flush=True)
    assert terminal.getvalue() == "été 狗\n".encode()


def test_what_a_terminal_cannot_show_is_escaped(ascii_only: Callable[[], io.BytesIO]) -> None:
    terminal = ascii_only()
    tolerate_terminal()
    print("été 狗", flush=True)
    assert terminal.getvalue() == rb"\xe9t\xe9 \u72d7" + b"\n"


def test_a_closed_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    tolerate_terminal()
    with pytest.raises(ValueError, match="closed"):
        utf8_output()
