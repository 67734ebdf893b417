"""Enough of a chat server for a talk: repeats the last message word by word, refuses "refuse", fails at "break", hangs at "wait"."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WAIT_S = 60.0


class Handler(BaseHTTPRequestHandler):
    """Keeps every body in the server's `bodies`."""

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "echo"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        words = body["messages"][-1]["content"].split()
        if words == ["refuse"]:
            self._answer(400, b'{"error": {"message": "No such [/thing]."}}')
            return
        if words == ["long"]:
            self._answer(400, b'{"error": {"message": "This is long.", "code": "context_length_exceeded"}}')
            return
        chunks = [{"choices": [{"delta": {"content": f"{word} "}}]} for word in words]
        if words == ["break"]:
            chunks.append({"error": {"message": "The engine stopped."}})
        chunks.append({"choices": [], "usage": {"completion_tokens": len(words)}})
        lines = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
        if words == ["wait"]:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(lines[0])
            self.wfile.flush()
            self.server.ended.wait(WAIT_S)
            return
        self._answer(200, b"".join([*lines, b"data: [DONE]\n\n"]))

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def echo_server() -> Iterator[ThreadingHTTPServer]:
    """A running server; `bodies` are those it was sent."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies, server.ended = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
