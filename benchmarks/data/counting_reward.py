"""A reward server for measurements, which counts its requests. Its rewards differ within most groups."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class CountingReward:
    """A server on a free port of this machine while the block runs."""

    def __init__(self) -> None:
        self.asked = 0
        """Requests answered."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        """Where it is asked."""
        return f"http://127.0.0.1:{self._server.server_port}/score"

    def __enter__(self) -> CountingReward:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps([ninths(response) for response in asked["responses"]]).encode()
                outer.asked += 1
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def ninths(response: str) -> float:
    """The response's last character, from 0 to 1 if it is a digit; 0 of others and of an empty response."""
    return int(response[-1]) / 9 if response[-1:] in set("0123456789") else 0.0
