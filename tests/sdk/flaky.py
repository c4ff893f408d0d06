"""A bad network: an HTTP proxy on loopback that fails as it is told, and notes what it saw."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR
from typing import Literal

import httpx

Fate = Literal[
    "busy",
    "no answer",
    "lose the answer",
    "lose the request",
    "a login page",
    "a welcome page",
    "no such page",
    "too large",
]
PAGES: dict[Fate, int] = {
    "busy": 503,
    "a login page": 401,
    "a welcome page": 200,
    "no such page": 404,
    "too large": 413,
}


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class FlakyNetwork:
    """Requests meet the given fates in turn; when none is left, they get through."""

    url: str
    broker_url: str
    fates: list[Fate] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def pass_on(self, request: Seen) -> httpx.Response:
        kept = {name: value for name, value in request.headers.items() if name != "host"}
        return httpx.request(
            request.method, self.broker_url + request.path, content=request.body, headers=kept
        )


@contextmanager
def flaky_network(broker_url: str) -> Iterator[FlakyNetwork]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.treat()

        def do_POST(self) -> None:
            self.treat()

        def treat(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Seen(self.command, self.path, headers, body)
            network.seen.append(request)
            fate = network.fates.pop(0) if network.fates else None
            if fate in PAGES:
                self.reply(PAGES[fate], b"<h1>not the broker</h1>")
            elif fate == "no answer":
                network.over.wait()
            elif fate == "lose the request":
                self.connection.shutdown(SHUT_RDWR)
            else:
                answer = network.pass_on(request)
                if fate == "lose the answer":
                    self.connection.shutdown(SHUT_RDWR)
                else:
                    self.reply(answer.status_code, answer.content)

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - inherited
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        network = FlakyNetwork(f"http://127.0.0.1:{server.server_port}", broker_url)
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            yield network
        finally:
            network.over.set()
            server.shutdown()
            serving.join()
