"""The page while training goes on: a small server on this machine, which only reads.

A page is built when a browser asks for one and the run's files have changed, and not before the
last build has been paid for: building takes at most `SHARE` of the machine's processor time, so
that training next to it is not slowed by more.
"""

import html
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gradvac.utils.local_server import HOST, LocalHandler

SHARE = 0.01  # of all processors' time
_SECONDS = 2.0  # between questions of a browser, and between builds at the least

Build = Callable[[dict[str, Any]], str]
"""Makes the page, given what it needs to ask for a newer one."""


class LivePage:
    """A page that is built again when the files it is about have changed, now and then.

    Args:
        build: Makes the page; a `ValueError` says that there is nothing to show yet.
        folders: Run folders to watch.
        clock: Tells the time in seconds.
    """

    def __init__(
        self, build: Build, folders: Sequence[Path], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._build, self._folders, self._clock = build, list(folders), clock
        self._lock = threading.Lock()
        self._page, self._version, self._due = b"", "", float("-inf")

    def version(self) -> str:
        """What a browser compares: changes when it is time to load the page anew."""
        if self._clock() < self._due:
            return self._version
        return self._stamp()

    def page(self) -> bytes:
        """The page, built anew if that is due."""
        with self._lock:
            stamp = self.version()
            if stamp == self._version and self._page:
                return self._page
            begin = time.thread_time()
            live = {"version": stamp, "seconds": _SECONDS}
            try:
                with warnings.catch_warnings():
                    # A record that is being written ends in the middle of a chunk.
                    warnings.filterwarnings("ignore", ".*cut off and passed over")
                    text = self._build(live)
            except ValueError as reason:
                text = _waiting(str(reason))
            cost = time.thread_time() - begin
            self._page, self._version = text.encode(), stamp
            self._due = self._clock() + max(_SECONDS, cost / SHARE / (os.cpu_count() or 1))
            return self._page

    def _stamp(self) -> str:
        """Sizes and times of everything in the folders that the page may show."""
        stamps = []
        for folder in self._folders:
            for path in sorted([*folder.glob("*.*"), *folder.glob("scores/*.json")]):
                try:
                    status = path.stat()
                except OSError:  # it was replaced just now
                    continue
                stamps.append((str(path), status.st_size, status.st_mtime_ns))
        return f"{hash(tuple(stamps)) & (1 << 64) - 1:x}"


def serve_live(page: LivePage, *, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page, on this machine alone; port 0 is any free one. Call `serve_forever`."""

    class Handler(LocalHandler):
        def do_GET(self) -> None:  # noqa: N802
            if self.path == "/":
                self.answer(page.page(), "text/html")
            elif self.path == "/version":
                self.answer(page.version().encode(), "text/plain")
            else:
                self.send_error(404)

    return ThreadingHTTPServer((HOST, port), Handler)


def _waiting(reason: str) -> str:
    return (
        '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="3">'
        '<title>Waiting</title><body style="font: 1rem/1.5 system-ui, sans-serif; margin: 2rem">'
        f"<p>There is nothing to show yet; this page looks again by itself.<p>{html.escape(reason)}"
    )
