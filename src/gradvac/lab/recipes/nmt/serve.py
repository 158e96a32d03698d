"""A model that stays loaded, on this machine: a page to type into, and JSON for programs.

    POST /translate  {"lines": ["a dog"], "to": "fr"}  ->  {"lines": ["un chien"], "cut": 0}
    GET  /about      {"run": "runs/own", "targets": [{"code": "fr", "name": "French"}]}
    GET  /           the page

What is wrong with a request is said in {"error": ...}. "cut" counts lines of which only the
beginning was translated, because they are longer than `data.max_tokens`.
"""

from __future__ import annotations

import json
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gradvac.lab.languages.real import find
from gradvac.lab.recipes.nmt.translator import Translator
from gradvac.utils.local_server import HOST, LocalHandler

_LONGEST = 1_000_000  # bytes of a request
_JSON = "application/json"


class RequestError(ValueError):
    """A request that cannot be answered, and the status to say so with."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def serve_translator(translator: Translator, name: str, *, port: int = 0) -> ThreadingHTTPServer:
    """A server on this machine alone; `serve_forever` starts it.

    Args:
        translator: Translates one request after the other.
        name: What the page calls it.
        port: 0: any that is free; see `server_port`.
    """
    page = Path(__file__).with_name("serve.html").read_bytes()
    named = ((code, find(code)) for code in translator.targets)
    targets = [
        {"code": code, "name": code if known is None else known.name} for code, known in named
    ]
    about = _encode({"run": name, "targets": targets})
    lock = threading.Lock()  # a model has one search

    def translate(request: Any) -> dict[str, Any]:
        lines, target = _read(request)
        with lock:
            before = translator.counts.cut
            try:
                translations = translator.translate(lines, target)
            except ValueError as error:
                raise RequestError(400, str(error)) from error
            return {"lines": translations, "cut": translator.counts.cut - before}

    class Handler(LocalHandler):
        def do_GET(self) -> None:  # noqa: N802
            if self.path == "/":
                self.answer(page, "text/html")
            elif self.path == "/about":
                self.answer(about, _JSON)
            else:
                self.answer(_encode({"error": f"there is no {self.path}"}), _JSON, 404)

        def do_POST(self) -> None:  # noqa: N802
            try:
                if self.path != "/translate":
                    raise RequestError(404, f"there is no {self.path}; POST to /translate")
                self.answer(_encode(translate(self._request())), _JSON)
            except RequestError as refused:
                self.close_connection = True  # what it sent may not have been read
                self.answer(_encode({"error": str(refused)}), _JSON, refused.status)

        def _request(self) -> Any:
            # Pages of other sites cannot send this type without asking first, which gets no answer.
            if self.headers.get_content_type() != _JSON:
                raise RequestError(415, f"Content-Type: must be {_JSON}")
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise RequestError(411, "Content-Length: is missing")
            if len(length) > len(str(_LONGEST)) or int(length) > _LONGEST:
                raise RequestError(413, f"at most {_LONGEST:,} bytes at a time")
            try:
                return json.loads(self.rfile.read(int(length)))
            except (ValueError, RecursionError) as error:
                raise RequestError(400, f"is not JSON: {error}") from error

    return ThreadingHTTPServer((HOST, port), Handler)


def _read(request: Any) -> tuple[list[str], str]:
    if not isinstance(request, dict) or set(request) != {"lines", "to"}:
        raise RequestError(400, 'must be {"lines": ["..."], "to": "xx"}')
    lines, target = request["lines"], request["to"]
    if not (isinstance(lines, list) and all(isinstance(line, str) for line in lines)):
        raise RequestError(400, "lines: must be a list of strings")
    if any("\ud800" <= letter <= "\udfff" for line in lines for letter in line):
        raise RequestError(400, "lines: half of a surrogate pair is no letter")
    if not isinstance(target, str):
        raise RequestError(400, "to: must be the code of a language")
    return lines, target


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")
