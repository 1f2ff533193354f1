"""A web server on loopback that records the requests that it gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Receiver(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[str, dict[str, Any]]] = []
        """Path and body of each POST."""
        self.answer = (200, {})  # type: tuple[int, dict[str, str]]
        """Status and headers of the reply to each request."""
        self.answers = threading.Event()
        """Cleared by a test to hold the answers to POSTs back."""
        self.answers.set()

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def news(self) -> list[tuple[int, str]]:
        """Return experiment and state of each notification."""
        return [(body["experiment"], body["state"]) for _path, body in self.received]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.received.append((self.path, json.loads(body)))
        self.server.answers.wait()
        self._reply()

    def do_GET(self) -> None:
        self.server.received.append((f"GET {self.path}", {}))
        self._reply()

    def _reply(self) -> None:
        status, headers = self.server.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # a proxy of this machine must not be used for loopback
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.answers.set()
    server.shutdown()
    server.server_close()
    thread.join()
