"""What people see: a bar on a terminal, lines in a file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gradvac.lab.training import Display

VALUES = {"train/loss": 1.23456, "train/lr": 1e-3, "train/tokens_per_second": 12345.6}


@pytest.mark.parametrize("terminal", [False, True])
def test_speed_and_time_left_are_shown(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    with Display(console) as display:
        display.open(0, 100)
        display.advance(10)
        display.show(10, VALUES, seconds_left=3 * 3600 + 61)
        display.say("a [message] with brackets")
    text = file.getvalue()
    for part in ("10/100", "loss 1.2346", "12,346 tokens/s", "3:01:01 left"):
        assert part in text
    assert "a [message] with brackets" in text
    assert ("\x1b[" in text) == terminal


def test_quiet_shows_messages_only() -> None:
    file = io.StringIO()
    with Display(Console(file=file, force_terminal=True), quiet=True) as display:
        display.open(0, 100)
        display.advance(1)
        display.show(1, VALUES, seconds_left=1.0)
        assert file.getvalue() == ""
        display.say("something")
    assert "something" in file.getvalue()
