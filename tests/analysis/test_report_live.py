"""The live page: keeps up with a run, reads only, takes little."""

import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradvac.analysis.report import LivePage, render, serve_live
from gradvac.analysis.report.live import SHARE

from .made_runs import make_run
from .test_report_page import Page

RUN = make_run("live", codes=("fr", "es", "de", "fi", "et"), num_layers=1, num_steps=4)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "record.bin").write_bytes(b"1")
    return tmp_path


def grow(folder: Path) -> None:
    with (folder / "record.bin").open("ab") as file:
        file.write(b"more")


def test_built_when_something_changed_and_paid_for(folder: Path) -> None:
    built, clock = [], Clock()

    def build(live: dict[str, Any]) -> str:
        built.append(live)
        sum(range(2_000_000))  # some work
        return f"<p>{len(built)}"

    page = LivePage(build, [folder], clock)
    assert page.page() == b"<p>1"
    first = page.version()
    assert built[0]["version"] == first
    grow(folder)
    clock.now += 1.9
    assert page.version() == first  # too early
    assert page.page() == b"<p>1"
    clock.now += 3600
    assert page.version() != first
    assert page.page() == b"<p>2"
    clock.now += 3600
    assert page.page() == b"<p>2"  # nothing new
    assert len(built) == 2


def test_a_costly_page_is_built_rarely(folder: Path) -> None:
    clock = Clock()
    work = 6_000_000

    def build(_: dict[str, Any]) -> str:
        sum(range(work))
        return "page"

    page = LivePage(build, [folder], clock)
    begin = time.thread_time()
    page.page()
    cost = time.thread_time() - begin
    grow(folder)
    clock.now += 0.8 * max(2.0, cost / SHARE / (os.cpu_count() or 1))
    before = page.version()
    clock.now += 0.4 * max(2.0, cost / SHARE / (os.cpu_count() or 1)) + 1
    assert page.version() != before


def test_nothing_to_show_yet(folder: Path) -> None:
    def build(_: dict[str, Any]) -> str:
        raise ValueError("run <x>: has neither record.bin nor similarity.npz")

    text = LivePage(build, [folder]).page().decode()
    assert "nothing to show yet" in text
    assert "&lt;x&gt;" in text
    assert 'http-equiv="refresh"' in text


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[str, LivePage, list[Any], Clock]]:
    runs, clock = [RUN], Clock()
    page = LivePage(lambda live: render(runs, live=live), [folder], clock)
    with serve_live(page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/", page, runs, clock
        server.shutdown()


def test_only_this_machine_and_only_the_page(
    served: tuple[str, LivePage, list[Any], Clock],
) -> None:
    address = served[0]
    with urllib.request.urlopen(address + "version") as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(address + "../etc/passwd")
    foreign = urllib.request.Request(address, headers={"Host": "evil.example:80"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(foreign)


def test_browser_follows_the_run(
    served: tuple[str, LivePage, list[Any], Clock], folder: Path, chromium: Any
) -> None:
    """New data arrive by themselves, and what was chosen and opened stays so."""
    address, _, runs, clock = served
    page = Page(chromium)
    page.troubles()  # of pages before
    chromium.get(address)
    page.wait_for(lambda: page.js(page.ready))
    page.choose("component", "decoder.layers.0")
    page.driver.execute_script("document.getElementById('steps').open = true")
    runs[:] = [replace(make_run("live", codes=("fr", "es", "de"), num_layers=1), name="live")]
    grow(folder)
    clock.now += 3600
    page.wait_for(
        lambda: (
            page.js(
                "document.documentElement.dataset.ready && DATA.runs[0].sources[0].tasks.length"
            )
            == 3
        )
    )
    assert page.js("document.getElementById('component').value") == "decoder.layers.0"
    assert page.js("document.getElementById('steps').open") is True
    assert page.find("#live").text.startswith("live")
    assert page.troubles() == []
