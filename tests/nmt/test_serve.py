"""`gradvac nmt serve`: a page to type into, JSON for programs, and nothing for other sites."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradvac.lab.recipes.nmt import Translator
from gradvac.lab.recipes.nmt.serve import serve_translator

from .. import browser

KIND = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def translator(toy_run: Path) -> Translator:
    return Translator.from_run(toy_run)


@pytest.fixture(scope="module")
def port(translator: Translator) -> Iterator[int]:
    with serve_translator(translator, "runs/<toy>") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def ask(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] = KIND
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("localhost", port, timeout=60)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    is_json = answer.headers.get_content_type() == KIND["Content-Type"]
    return answer.status, json.loads(content) if is_json else content.decode()


def test_programs_get_translations(port: int, translator: Translator) -> None:
    """From several at once, each its own."""
    lines = [f"ba {word} le" for word in ("no", "mi", "hu", "fi")]
    expected = [translator.translate([line, ""], "yy") for line in lines]
    found: dict[str, Any] = {}

    def one(line: str) -> None:
        found[line] = ask(port, "POST", "/translate", {"lines": [line, ""], "to": "yy"})

    threads = [threading.Thread(target=one, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [(200, {"lines": texts, "cut": 0}) for texts in expected]
    assert [found[line] for line in lines] == answers
    long = {"lines": ["ba " * 50, "ba"], "to": "xx"}
    assert ask(port, "POST", "/translate", long)[1]["cut"] == 1
    targets = [{"code": code, "name": code} for code in ("xx", "yy")]
    assert ask(port, "GET", "/about") == (200, {"run": "runs/<toy>", "targets": targets})


@pytest.mark.parametrize(
    ("body", "headers", "status", "reason"),
    [
        (b"{", KIND, 400, "is not JSON"),
        (b"\xff", KIND, 400, "is not JSON"),
        (b"[" * 100_000, KIND, 400, "is not JSON"),
        ([], KIND, 400, "must be"),
        ({"lines": ["ba"]}, KIND, 400, "must be"),
        ({"lines": ["ba"], "to": "xx", "too": 1}, KIND, 400, "must be"),
        ({"lines": "ba", "to": "xx"}, KIND, 400, "lines: must be a list"),
        ({"lines": ["ba", 3], "to": "xx"}, KIND, 400, "lines: must be a list"),
        ({"lines": ["ba"], "to": None}, KIND, 400, "to: must be"),
        ({"lines": ["ba"], "to": "zz"}, KIND, 400, "'zz' is unknown; this model .*xx, yy"),
        ({"lines": ["ba"], "to": "xx"}, {"Content-Type": "text/plain"}, 415, "Content-Type"),
        (b"", KIND | {"Content-Length": "many"}, 411, "Content-Length"),
        (b"", KIND | {"Content-Length": "1000001"}, 413, "1,000,000"),
        (b"", KIND | {"Content-Length": "9" * 5000}, 413, "1,000,000"),
        (b'{"lines": ["\\ud800"], "to": "xx"}', KIND, 400, "surrogate"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(
    port: int, body: Any, headers: dict[str, str], status: int, reason: str
) -> None:
    found, said = ask(port, "POST", "/translate", body, headers)
    assert found == status
    assert re.search(reason, said["error"])
    assert ask(port, "POST", "/translate", {"lines": [], "to": "xx"})[0] == 200  # it goes on


def test_other_paths_methods_and_sites_get_nothing(port: int) -> None:
    assert ask(port, "GET", "/../config.toml")[0] == 404
    assert ask(port, "POST", "/", {})[0] == 404
    assert ask(port, "PUT", "/translate", {})[0] == 501
    assert ask(port, "GET", "/about", headers={"Host": "localhost"})[0] == 200  # as on port 80
    foreign = KIND | {"Host": "evil.example:8000"}
    for method in ("GET", "POST"):
        assert ask(port, method, "/translate", {"lines": [], "to": "xx"}, foreign)[0] == 403


def test_a_browser_translates_what_is_typed(
    port: int, translator: Translator, chromium: Any, tmp_path: Path
) -> None:
    from selenium.webdriver.support.ui import Select

    page = browser.Page(chromium)
    page.troubles()  # of pages before
    chromium.get(f"http://localhost:{port}/")
    page.wait_for(lambda: page.js("document.getElementById('to').options.length") == 2)
    assert page.find("h1").text == "Translate with runs/<toy>"
    Select(page.find("#to")).select_by_value("yy")
    page.find("#source").send_keys("ba no le\nmi hu")
    page.find("#go").click()
    page.wait_for(lambda: page.js("document.getElementById('target').value"))
    expected = "\n".join(translator.translate(["ba no le", "mi hu"], "yy"))
    assert page.js("document.getElementById('target').value") == expected
    page.find("#source").send_keys(" ba" * 60)
    page.find("#go").click()
    page.wait_for(lambda: "1 of the lines too long" in page.find("#said").text)
    page.js("document.getElementById('to').options[0].value = 'zz'")
    Select(page.find("#to")).select_by_index(0)
    page.find("#go").click()
    page.wait_for(lambda: "'zz' is unknown" in page.find("#said").text)
    assert page.js("document.getElementById('target').value") == ""
    assert [line for line in page.troubles() if "400" not in line] == []
    for width in (1400, 400):
        page.resize(width)
        assert page.js("document.documentElement.scrollWidth") <= width


def test_ctrl_c_ends_the_command(toy_run: Path) -> None:
    command = [sys.executable, "-m", "gradvac", "nmt", "serve", str(toy_run), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline()
        port = int(address.partition("localhost:")[2].partition("/")[0])
        assert ask(port, "POST", "/translate", {"lines": ["ba"], "to": "xx"})[0] == 200
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
