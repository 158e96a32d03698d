"""Pages for the browser of this machine: what servers of them share."""

from contextlib import suppress
from http.server import BaseHTTPRequestHandler

HOST = "127.0.0.1"


class LocalHandler(BaseHTTPRequestHandler):
    """Answers this machine alone, without a line in the terminal for every question."""

    def parse_request(self) -> bool:
        """Refuse pages of other sites that ask through a name of their own for this machine."""
        if not super().parse_request():
            return False
        is_local = self.headers.get("Host", "").partition(":")[0] in (HOST, "localhost")
        if not is_local:
            self.send_error(403)
        return is_local

    def answer(self, content: bytes, kind: str, status: int = 200) -> None:
        """Send a whole answer; nothing if whoever asked is gone."""
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nobody wants to read of every question."""
