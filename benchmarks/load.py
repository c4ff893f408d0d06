"""Load: replays prepared requests on keep-alive connections, by `wrk`, or by a loop of our own.

`wrk` is the better one: it leaves its core half idle. Ours is about as fast as the bare
application, so where there is no `wrk` the fast answers look a little too good beside it.
"""

import re
import select
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

_REPLAY = Path(__file__).with_name("replay.lua")
_COUNTED = re.compile(r"^counted (\d+) (\d+) (\d+)$", re.MULTILINE)
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Load:
    """What one run of one generator saw."""

    answers: int
    errors: int
    """Answers that were no 200 or lacked the wanted text, and failures of connections."""
    seconds: float

    @property
    def rate(self) -> float:
        return self.answers / self.seconds


def generator() -> str:
    return "wrk" if shutil.which("wrk") else "own"


def drive(port: int, requests: Path, wanted: str, connections: int, seconds: int) -> Load:
    """Sends the requests of a file in turn, over and over, each connection one at a time."""
    if generator() == "wrk":
        return _wrk(port, requests, wanted, connections, seconds)
    return _own(port, requests, wanted.encode(), connections, seconds)


def _wrk(port: int, requests: Path, wanted: str, connections: int, seconds: int) -> Load:
    shape = ["--threads", "1", "--connections", str(connections), "--duration", f"{seconds}s"]
    script = ["--script", str(_REPLAY), f"http://127.0.0.1:{port}", "--", str(requests), wanted]
    ran = subprocess.run(["wrk", *shape, *script], check=True, capture_output=True, text=True)  # noqa: S607
    counted = _COUNTED.search(ran.stdout)
    if counted is None:
        raise RuntimeError(f"wrk said:\n{ran.stdout}{ran.stderr}")
    answers, errors, microseconds = map(int, counted.groups())
    return Load(answers, errors, microseconds / 1e6)


@dataclass
class _Connection:
    socket: socket.socket
    received: bytes = b""
    missing: int = field(default=0)


def _own(port: int, file: Path, wanted: bytes, connections: int, seconds: int) -> Load:
    requests = _read(file)
    poll = select.poll()
    open_ones: dict[int, _Connection] = {}
    for _ in range(connections):
        one = socket.create_connection(("127.0.0.1", port))
        open_ones[one.fileno()] = _Connection(one)
        poll.register(one, select.POLLIN)
    answers = errors = 0
    started = time.perf_counter()
    for sent, connection in enumerate(open_ones.values()):
        connection.socket.sendall(requests[sent % len(requests)])
    while time.perf_counter() < started + seconds:
        for descriptor, _ in poll.poll(1000):
            connection = open_ones[descriptor]
            answer = _answer(connection)
            if answer is None:
                continue
            answers += 1
            errors += not answer.startswith(b"HTTP/1.1 200") or wanted not in answer
            connection.socket.sendall(requests[(connections + answers) % len(requests)])
    took = time.perf_counter() - started
    for connection in open_ones.values():
        connection.socket.close()
    return Load(answers, errors, took)


def _answer(connection: _Connection) -> bytes | None:
    """The next whole answer, `None` while it is incomplete."""
    received = connection.socket.recv(65536)
    if not received:
        raise ConnectionError("the server closed a connection")
    received = connection.received + received
    head = received.find(b"\r\n\r\n") + 4
    length = _LENGTH.search(received, 0, head) if head > 3 else None
    if length is None or len(received) < head + int(length[1]):
        connection.received = received
        return None
    connection.received = b""
    return received


def _read(file: Path) -> list[bytes]:
    requests = []
    with file.open("rb") as stream:
        while length := stream.readline():
            requests.append(stream.read(int(length)))
    return requests
