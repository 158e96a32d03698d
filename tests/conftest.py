"""What holds for all tests."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from . import browser

# What runs in the background, or under nohup, starts with Ctrl-C or hang-ups ignored, and its child
# processes inherit that: tests that send these signals would wait for ever.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The driver of a browser, for `browser.Page`."""
    with browser.start() as driver:
        yield driver
