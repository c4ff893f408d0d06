"""Signals to the callback URLs of tool servers, and where none are sent."""

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from ssl import SSLContext
from typing import Any

import pytest

from app.workers.callbacks import Callbacks, Kind, Outcome
from tests.support.certificates import write_certificate
from tests.support.processes import free_port
from tests.support.servers import Upstream, answer_with, running_upstream
from tests.support.waiting import PATIENCE, eventually

HEADERS = {
    "content-type": "application/json",
    "user-agent": "taskbroker/test",
    "webhook-id": "msg_1",
}
BODY = b'{"type":"task.cancel_requested"}'
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
SOON = 0.3


@pytest.fixture
async def callbacks() -> AsyncIterator[Callbacks]:
    """What an operator has who allows private addresses."""
    callbacks = Callbacks(private_allowed=True, seconds=PATIENCE)
    yield callbacks
    await callbacks.close()


@pytest.fixture
async def hasty() -> AsyncIterator[Callbacks]:
    callbacks = Callbacks(private_allowed=True, seconds=SOON)
    yield callbacks
    await callbacks.close()


@pytest.fixture
async def guarded() -> AsyncIterator[Callbacks]:
    """What an operator has who sets nothing."""
    callbacks = Callbacks(private_allowed=False, seconds=PATIENCE)
    yield callbacks
    await callbacks.close()


@pytest.fixture
async def tool_server() -> AsyncIterator[Upstream]:
    async with running_upstream() as upstream:
        yield upstream


Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class RawServer:
    """A server that need not speak HTTP."""

    port: int = 0
    connections: int = 0
    received: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def url(self, scheme: str = "http", host: str = "127.0.0.1") -> str:
        return f"{scheme}://{host}:{self.port}/hook"


@asynccontextmanager
async def talking(
    conversation: Conversation | None = None, tls: SSLContext | None = None
) -> AsyncIterator[RawServer]:
    """A server that reads a request and then does this; without anything, says that it is OK."""
    server = RawServer()
    talks: set[asyncio.Task[Any]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        talk = asyncio.current_task()
        assert talk is not None
        talks.add(talk)
        # Whoever tests breaks off, and some conversations never end by themselves.
        with suppress(OSError, asyncio.CancelledError):
            while not server.received.endswith(BODY) and (some := await reader.read(65_536)):
                server.received += some
            if conversation is None:
                writer.write(OK)
                await writer.drain()
            else:
                await conversation(reader, writer)
        writer.close()
        server.ended.set()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for talk_under_way in talks:
            talk_under_way.cancel()
        await asyncio.gather(*talks)


def saying(answer: bytes) -> Conversation:
    async def conversation(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return conversation


def saying_forever(answer: bytes, then: bytes) -> Conversation:
    async def conversation(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in chain([answer], repeat(then)):
            writer.write(part)
            await writer.drain()

    return conversation


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


class Names:
    """The names under `.example`. A look-up takes the next answer; the last one stays."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[list[str]]] = {}
        self.hanging: dict[str, threading.Event] = {}
        self.asked: list[str] = []
        self._really = socket.getaddrinfo

    def look_up(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if not str(host).endswith(".example"):
            return self._really(host, port, *args, **options)
        self.asked.append(host)
        if host in self.hanging:
            self.hanging[host].wait()
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        answers = self.addresses[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return list(chain.from_iterable(self._really(one, port, *args, **options) for one in found))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.look_up)
    yield names
    for hanging in names.hanging.values():
        hanging.set()


# --- what becomes of a signal ---------------------------------------------------------------


async def test_a_signal_arrives_as_it_was_given_and_nothing_is_added(
    callbacks: Callbacks, tool_server: Upstream
) -> None:
    tool_server.behaviour = answer_with(b"thanks", headers=[("set-cookie", "a=b")])
    for _ in range(2):
        assert await callbacks.post(f"{tool_server.url}?a=%2F", HEADERS, BODY) == Outcome(
            Kind.DELIVERED, 200
        )
        got = tool_server.last
        assert (got.method, got.path, got.query, got.body) == ("POST", "/mcp", b"a=%2F", BODY)
        assert {name for name, _ in got.headers} - {"host", "connection"} == {
            "content-length", *HEADERS,
        }  # fmt: skip
        assert all(got.header(name) == value for name, value in HEADERS.items())
        assert got.header("connection") == "close"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, Kind.DELIVERED) for status in (200, 201, 202, 204, 299)),
        *((status, Kind.REDIRECT) for status in (300, 301, 302, 303, 304, 307, 308)),
        (410, Kind.GONE),
        *((status, Kind.STATUS) for status in (400, 401, 404, 409, 429, 500, 503, 599)),
    ],
)
async def test_the_status_decides(
    callbacks: Callbacks, tool_server: Upstream, status: int, kind: Kind
) -> None:
    tool_server.behaviour = answer_with(b"", status=status)
    assert await callbacks.post(tool_server.url, HEADERS, BODY) == Outcome(kind, status)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(
    callbacks: Callbacks, tool_server: Upstream, status: int
) -> None:
    async with talking() as target:
        tool_server.behaviour = answer_with(
            b"", status=status, headers=[("location", target.url())]
        )
        outcome = await callbacks.post(tool_server.url, HEADERS, BODY)
        assert outcome == Outcome(Kind.REDIRECT, status)
        assert len(tool_server.received) == 1
        assert target.connections == 0


@pytest.mark.parametrize(
    ("status", "given", "kept"),
    [
        (429, "120", "120"),
        (503, "Fri, 31 Dec 2027 23:59:59 GMT", "Fri, 31 Dec 2027 23:59:59 GMT"),
        (503, "9" * 1000, "9" * 64),
        (503, "ä", None),
        (500, "120", None),
        (410, "120", None),
        (202, "120", None),
    ],
)
async def test_a_server_may_say_when_to_come_again(
    callbacks: Callbacks, status: int, given: str, kept: str | None
) -> None:
    answer = f"HTTP/1.1 {status} X\r\nretry-after: {given}\r\ncontent-length: 0\r\n\r\n"
    async with talking(saying(answer.encode())) as server:
        outcome = await callbacks.post(server.url(), HEADERS, BODY)
        assert (outcome.status, outcome.retry_after) == (status, kept)


async def test_the_body_of_an_answer_is_not_waited_for(callbacks: Callbacks) -> None:
    sent = 0

    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n")
        while True:
            writer.write(bytes(65_536))
            await writer.drain()
            sent += 65_536

    async with talking(endless) as server:
        assert (await callbacks.post(server.url(), HEADERS, BODY)).kind is Kind.DELIVERED
        await asyncio.wait_for(server.ended.wait(), PATIENCE)
        assert sent < 32 * 1024 * 1024, "what two sockets hold, and no more"


async def test_every_attempt_has_a_connection_of_its_own(callbacks: Callbacks) -> None:
    """A connection that the server has just closed would count as a failed attempt."""

    async def keep_alive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await reader.read()

    async with talking(keep_alive) as server:
        for attempt in (1, 2, 3):
            assert (await callbacks.post(server.url(), HEADERS, BODY)).kind is Kind.DELIVERED
            assert server.connections == attempt


async def test_proxies_of_the_environment_are_not_used(
    callbacks: Callbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with talking() as proxy, talking() as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert (await callbacks.post(server.url(), HEADERS, BODY)).kind is Kind.DELIVERED
        assert proxy.connections == 0


# --- servers that fail ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"\x15\x03\x01\x00\x02\x02\x50",
        b"HTTP/1.1 twohundred OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: a\r\n" * 100_000 + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
    ids=["nothing", "half", "ssh", "tls", "status", "header", "headers", "no final answer"],
)
async def test_what_is_no_http_is_broken(callbacks: Callbacks, answer: bytes) -> None:
    async with talking(saying(answer)) as server:
        outcome = await callbacks.post(server.url(), HEADERS, BODY)
        assert outcome == Outcome(Kind.BROKEN)


async def test_a_connection_that_is_reset_is_broken(callbacks: Callbacks) -> None:
    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once = b"\1\0\0\0\0\0\0\0"
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        writer.transport.abort()

    async with talking(reset) as server:
        assert await callbacks.post(server.url(), HEADERS, BODY) == Outcome(Kind.BROKEN)


@pytest.mark.parametrize(
    "conversation",
    [silent, saying_forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n")],
    ids=["silent", "never final"],
)
async def test_a_server_has_its_time_and_no_more(
    hasty: Callbacks, conversation: Conversation
) -> None:
    async with talking(conversation) as server:
        assert await hasty.post(server.url(), HEADERS, BODY) == Outcome(Kind.TIMEOUT)
        await asyncio.wait_for(server.ended.wait(), PATIENCE)


@pytest.mark.filterwarnings("ignore:Sending a large body")
@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
async def test_nothing_is_kept_of_what_a_server_does_not_read(hasty: Callbacks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as never_accepts:
        port = never_accepts.getsockname()[1]
        url = f"http://127.0.0.1:{port}/hook"
        assert await hasty.post(url, HEADERS, bytes(20_000_000)) == Outcome(Kind.TIMEOUT)
        ours = f" 0100007F:{port:04X} 01 "  # where it is connected to, and that it is
        await eventually(lambda: ours not in Path("/proc/net/tcp").read_text())


async def test_a_server_that_is_not_there_is_unreachable(callbacks: Callbacks) -> None:
    outcome = await callbacks.post(f"http://127.0.0.1:{free_port()}/hook", HEADERS, BODY)
    assert outcome == Outcome(Kind.UNREACHABLE)


async def test_a_host_without_an_address_is_unreachable(callbacks: Callbacks, names: Names) -> None:
    outcome = await callbacks.post("https://nowhere.example/hook", HEADERS, BODY)
    assert outcome.kind is Kind.UNREACHABLE
    assert outcome.detail == "The host name of the URL does not resolve."


async def test_an_attempt_can_be_cancelled(callbacks: Callbacks) -> None:
    async with talking(silent) as server:
        attempt = asyncio.create_task(callbacks.post(server.url(), HEADERS, BODY))
        await eventually(lambda: server.received)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        await asyncio.wait_for(server.ended.wait(), PATIENCE)


# --- certificates ---------------------------------------------------------------------------


async def test_a_certificate_must_be_known(callbacks: Callbacks, tmp_path: Path) -> None:
    async with talking(tls=write_certificate(tmp_path / "server.pem", "localhost")) as server:
        outcome = await callbacks.post(server.url("https", "localhost"), HEADERS, BODY)
        assert outcome == Outcome(Kind.TLS, detail="self-signed certificate")
        assert server.received == b""


@pytest.mark.parametrize(("host", "kind"), [("localhost", Kind.DELIVERED), ("127.0.0.1", Kind.TLS)])
async def test_a_certificate_must_be_for_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, kind: Kind
) -> None:
    tls = write_certificate(tmp_path / "server.pem", "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    callbacks = Callbacks(private_allowed=True, seconds=PATIENCE)
    async with talking(tls=tls) as server:
        outcome = await callbacks.post(server.url("https", host), HEADERS, BODY)
        assert outcome.kind is kind
        assert server.received.endswith(BODY) == (kind is Kind.DELIVERED)
    await callbacks.close()


async def test_a_server_without_tls_is_not_spoken_to_without(callbacks: Callbacks) -> None:
    async with talking(saying(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as server:
        server.received = BODY  # it answers at once
        outcome = await callbacks.post(server.url("https"), HEADERS, BODY)
        assert outcome.kind is Kind.TLS


# --- where nothing is sent ------------------------------------------------------------------

LOOPBACK = [
    "127.0.0.1", "127.1", "2130706433", "017700000001", "0177.0.0.1", "0x7f.1", "0x7f000001",
    "0x7F.0x0.0x0.0x1", "localhost", "LOCALHOST", "[::1]", "[0:0::0:1]", "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::127.0.0.1]", "[2002:7f00:1::]",
]  # fmt: skip
SPECIAL = [
    "0.0.0.0", "0", "0x0", "[::]", "[::ffff:0.0.0.0]", "224.0.0.1", "[ff02::1]",  # noqa: S104
    "255.255.255.255", "169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376",
    "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]", "[fd00:ec2::254]",
    "[fe80::1]", "[fe80::1%lo]", "100.100.100.200", "168.63.129.16",
]  # fmt: skip


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("host", LOOPBACK + SPECIAL)
async def test_private_addresses_are_refused_however_they_are_written(
    guarded: Callbacks, scheme: str, host: str
) -> None:
    async with talking() as server:
        outcome = await guarded.post(server.url(scheme, host), HEADERS, BODY)
        looked = await guarded.look(server.url(scheme, host))
        assert_forbidden(outcome)
        assert looked == outcome
        assert server.connections == 0


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("host", SPECIAL)
async def test_some_are_refused_even_where_private_ones_are_allowed(
    callbacks: Callbacks, scheme: str, host: str
) -> None:
    async with talking() as server:
        assert_forbidden(await callbacks.post(server.url(scheme, host), HEADERS, BODY))
        assert server.connections == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "0x7f.1", "0x7f000001", "localhost"])
async def test_private_ones_can_be_allowed(callbacks: Callbacks, host: str) -> None:
    async with talking() as server:
        assert (await callbacks.post(server.url(host=host), HEADERS, BODY)).kind is Kind.DELIVERED


@pytest.mark.parametrize("host", ["127.1", "2130706433", "017700000001", "127.0.0.01"])
async def test_numbers_that_not_everything_reads_alike_are_refused(
    callbacks: Callbacks, host: str
) -> None:
    async with talking() as server:
        outcome = await callbacks.post(server.url(host=host), HEADERS, BODY)
        assert_forbidden(outcome)
        assert await callbacks.look(server.url(host=host)) == outcome
        assert server.connections == 0


@pytest.mark.parametrize("host", ["8.8.8.8", "[2606:4700:4700::1111]", "[::ffff:8.8.8.8]"])
async def test_nothing_is_sent_unencrypted_to_public_addresses(
    callbacks: Callbacks, guarded: Callbacks, host: str
) -> None:
    for either in (callbacks, guarded):
        outcome = await either.post(f"http://{host}/hook", HEADERS, BODY)
        assert outcome == Outcome(Kind.FORBIDDEN, detail="The URL must begin with https://.")


@pytest.mark.parametrize(
    "url",
    ["", "hook", "ftp://tools.example/", "http://", "https:///x", "https://tools.example:0/",
     "https://tools.example:65536/", "https://tools.example/#a", "https://tools.example/a b",
     "https://tools.example/\r\nx: y", "https://me:secret@tools.example/", "https://[::1",
     "https://me@tools.example/", "https://tools.example\\@127.0.0.1/", "https://a..example/"],
)  # fmt: skip
async def test_a_url_that_cannot_be_called_is_not_even_looked_up(
    callbacks: Callbacks, names: Names, url: str
) -> None:
    outcome = await callbacks.post(url, HEADERS, BODY)
    assert_forbidden(outcome)
    assert await callbacks.look(url) == outcome
    assert "secret" not in str(outcome)
    assert names.asked == []


async def test_of_several_addresses_those_that_are_allowed_are_used(
    callbacks: Callbacks, names: Names
) -> None:
    names.addresses["tools.example"] = [["169.254.169.254", "0.0.0.0", "127.0.0.1"]]  # noqa: S104
    async with talking() as server:
        outcome = await callbacks.post(server.url(host="tools.example"), HEADERS, BODY)
        assert outcome.kind is Kind.DELIVERED
        assert b"\r\nHost: tools.example:" in server.received


async def test_of_several_addresses_one_that_answers_is_enough(
    callbacks: Callbacks, names: Names
) -> None:
    names.addresses["tools.example"] = [["127.0.0.9", "127.0.0.1"]]  # none listens at the first
    async with talking() as server:
        assert await callbacks.look(server.url(host="tools.example")) is None
        outcome = await callbacks.post(server.url(host="tools.example"), HEADERS, BODY)
        assert outcome.kind is Kind.DELIVERED


async def test_a_name_that_leads_nowhere_allowed_is_refused(
    guarded: Callbacks, names: Names
) -> None:
    names.addresses["tools.example"] = [["10.0.0.1", "127.0.0.1", "::1"]]
    async with talking() as server:
        url = server.url("https", "tools.example")
        assert_forbidden(await guarded.post(url, HEADERS, BODY))
        assert server.connections == 0


async def test_what_was_judged_is_what_is_connected_to(callbacks: Callbacks, names: Names) -> None:
    """A second look-up within an attempt would find another address: "DNS rebinding"."""
    names.addresses["tools.example"] = [["127.0.0.1"], ["169.254.169.254"]]
    async with talking() as server:
        outcome = await callbacks.post(server.url(host="tools.example"), HEADERS, BODY)
        assert outcome.kind is Kind.DELIVERED
        assert names.asked == ["tools.example"]
        assert_forbidden(await callbacks.post(server.url(host="tools.example"), HEADERS, BODY))


async def test_a_public_name_that_turns_private_gets_nothing(names: Names) -> None:
    names.addresses["tools.example"] = [["::8.8.8.8"], ["127.0.0.1"]]  # the first has no route
    guarded = Callbacks(private_allowed=False, seconds=SOON)
    async with talking() as server:
        url = server.url("https", "tools.example")
        first = await guarded.post(url, HEADERS, BODY)
        assert first.kind in {Kind.UNREACHABLE, Kind.TIMEOUT}
        assert names.asked == ["tools.example"]
        assert_forbidden(await guarded.post(url, HEADERS, BODY))
        assert server.connections == 0
    await guarded.close()


async def test_what_is_connected_to_is_judged_once_more(
    guarded: Callbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HTTP client asks no resolver about an address in the URL."""
    really = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda _, *args, **options: really("8.8.8.8", *args, **options)
    )
    async with talking() as server:
        assert_forbidden(await guarded.post(server.url("https"), HEADERS, BODY))
        assert server.connections == 0


def assert_forbidden(outcome: Outcome) -> None:
    assert outcome.kind is Kind.FORBIDDEN
    assert outcome.detail


# --- looking up names -----------------------------------------------------------------------


async def test_a_name_whose_servers_hang_delays_no_other(
    callbacks: Callbacks, names: Names
) -> None:
    hanging = names.hanging["hangs.example"] = threading.Event()
    names.addresses["tools.example"] = [["127.0.0.1"]]
    attempts = [
        asyncio.create_task(callbacks.post("https://hangs.example/hook", HEADERS, BODY))
        for _ in range(100)
    ]
    await eventually(lambda: "hangs.example" in names.asked)
    async with talking() as server:
        outcome = await callbacks.post(server.url(host="tools.example"), HEADERS, BODY)
        assert outcome.kind is Kind.DELIVERED
    assert not any(attempt.done() for attempt in attempts)
    hanging.set()
    assert {outcome.kind for outcome in await asyncio.gather(*attempts)} == {Kind.UNREACHABLE}
    assert names.asked.count("hangs.example") == 1


async def test_a_name_is_looked_up_again_once_its_servers_answer(
    hasty: Callbacks, names: Names
) -> None:
    hanging = names.hanging["tools.example"] = threading.Event()
    names.addresses["tools.example"] = [["127.0.0.1"]]
    async with talking() as server:
        url = server.url(host="tools.example")
        for _ in range(3):
            assert await hasty.look(url) == Outcome(Kind.TIMEOUT)
        assert names.asked == ["tools.example"], "while the first look-up is under way"
        hanging.set()

        async def delivered() -> bool:
            return (await hasty.post(url, HEADERS, BODY)).kind is Kind.DELIVERED

        await eventually(delivered)


# --- looking before anything is sent --------------------------------------------------------


async def test_a_look_connects_and_sends_nothing(callbacks: Callbacks, names: Names) -> None:
    async with talking() as server:
        assert await callbacks.look(server.url("https")) is None
        await asyncio.wait_for(server.ended.wait(), PATIENCE)
        assert (server.connections, server.received) == (1, b"")


async def test_a_look_says_what_is_wrong(
    callbacks: Callbacks, guarded: Callbacks, names: Names
) -> None:
    away = f"https://127.0.0.1:{free_port()}/hook"
    assert await callbacks.look(away) == Outcome(Kind.UNREACHABLE)
    unknown = await callbacks.look("https://nowhere.example/")
    assert unknown is not None
    assert unknown.kind is Kind.UNREACHABLE
    private = await guarded.look(away)
    assert private is not None
    assert private.detail == (
        "The URL leads to a private address. Register a public one over https://, "
        "or set TASKBROKER_ALLOW_PRIVATE_CALLBACKS."
    )
