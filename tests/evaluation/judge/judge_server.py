"""A judge on this machine: an HTTP server in a thread that answers chat completions as a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What is sent back: `text` in a chat completion, or `body` as it is; `stop` breaks off in the middle."""

    text: str | None = "Rating: [[7]]"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    delay_s: float = 0.0
    stop: bool = False
    finish: str = "stop"

    def content(self) -> bytes:
        if self.body is not None:
            return self.body
        message = {"role": "assistant", "content": self.text}
        choice = {"index": 0, "message": message, "finish_reason": self.finish}
        return json.dumps(
            {"id": "1", "object": "chat.completion", "model": "judge-1", "choices": [choice]}
        ).encode()


class Judge:
    """The server; `answer(body, number)` is asked for each request, the first of which has number 0."""

    def __init__(self, answer: Callable[[Json, int], Answer]) -> None:
        self.answer = answer
        self.requests: list[Json] = []
        self.times: list[float] = []
        self.keys: list[str] = []
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with judge.lock:
                    number = len(judge.requests)
                    judge.requests.append({"path": self.path, **body})
                    judge.times.append(time.monotonic())
                    judge.keys.append(self.headers.get("Authorization", ""))
                    judge.under_way += 1
                    judge.most_under_way = max(judge.most_under_way, judge.under_way)
                try:
                    self._reply(judge.answer(body, number))
                finally:
                    with judge.lock:
                        judge.under_way -= 1

            def _reply(self, answer: Answer) -> None:
                time.sleep(answer.delay_s)
                content = answer.content()
                try:
                    self.send_response(answer.status)
                    for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content[: len(content) // 2] if answer.stop else content)
                    self.close_connection = answer.stop
                except OSError:
                    pass  # the client has given up waiting

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextmanager
def serve(answer: Callable[[Json, int], Answer]) -> Iterator[Judge]:
    """A judge while the block runs."""
    judge = Judge(answer)
    thread = threading.Thread(target=judge.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        judge.server.shutdown()
        judge.server.server_close()


def in_turn(*answers: Answer) -> Callable[[Json, int], Answer]:
    """One answer after the other, the last one for ever."""
    return lambda _, number: answers[min(number, len(answers) - 1)]
