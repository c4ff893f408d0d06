"""From `tasks/cancel` to its receipt by the callback of the tool server, in one running broker.

Quiet rounds take turns with rounds in which another tool server hangs, with a thousand signals
that it does not take. The ratio of the medians says what that costs a tool server that is well.
Receipt is when the head of the delivery has come; the client sends one request at a time.
"""

import asyncio
import base64
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from statistics import median, quantiles

from app.db.embedded import EmbeddedPostgres
from app.db.migrations import migrate
from app.main import create_broker
from app.settings import Settings
from benchmarks import corpus, servers
from benchmarks.corpus import StoredTask

ROUNDS = 4
CANCELS = 150
HANGING = 1_000
AT_A_TIME = 8  # what one process sends to one backend


class Callback:
    """Takes signals on loopback, or lets them hang."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self._arrived: asyncio.Queue[float] = asyncio.Queue()

    async def arrivals(self, count: int = 1) -> float:
        """When the last one of so many more has arrived."""
        for _ in range(count):
            last = await self._arrived.get()
        return last

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self._arrived.put_nowait(time.perf_counter())
        await self.free.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()


@asynccontextmanager
async def serving(callback: Callback) -> AsyncIterator[str]:
    server = await asyncio.start_server(callback.serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/signals"


class Client:
    """One connection to the broker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, request: bytes) -> float:
        """Sends a request and waits for its answer; when it was sent."""
        sent = time.perf_counter()
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"refused: {head[:40]!r}")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await self._reader.readexactly(length)
        return sent


async def latencies(client: Client, callback: Callback, tasks: list[StoredTask]) -> list[float]:
    """Milliseconds from each cancel to its receipt."""
    seen = []
    for request in corpus.cancels(tasks):
        sent = await client.send(request)
        seen.append((await callback.arrivals() - sent) * 1000)
    return seen


async def run(settings: Settings, port: int) -> tuple[list[float], list[float]]:
    """Milliseconds in quiet rounds, and in those beside one that hangs."""
    well, stuck = Callback(), Callback()
    broker = create_broker(settings)
    quiet: list[float] = []
    beside: list[float] = []
    async with serving(well) as well_url, serving(stuck) as stuck_url:
        tasks = await corpus.called_back(broker, settings, "well", well_url, CANCELS * ROUNDS * 2)
        hanging = await corpus.called_back(broker, settings, "stuck", stuck_url, HANGING * ROUNDS)
        await broker.db.close()
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        for number in range(ROUNDS):
            first, second = (tasks[(2 * number + half) * CANCELS :][:CANCELS] for half in (0, 1))
            quiet += await latencies(client, well, first)
            stuck.free.clear()
            for request in corpus.cancels(hanging[number * HANGING :][:HANGING]):
                await client.send(request)
            await stuck.arrivals(AT_A_TIME)
            beside += await latencies(client, well, second)
            stuck.free.set()
            await stuck.arrivals(HANGING - AT_A_TIME)
    return quiet, beside


def main() -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="taskbroker-bench-"))
        postgres = stack.enter_context(EmbeddedPostgres(Path(folder) / "data"))
        asyncio.run(migrate(postgres.url))
        key = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
        settings = Settings.model_validate(
            {"database_url": postgres.url, "secret_keys": (key,), "allow_private_callbacks": True}
        )
        port = stack.enter_context(servers.broker(settings))
        quiet, beside = asyncio.run(run(settings, port))
    print(f"tasks/cancel to receipt by the callback, {len(quiet)} each, milliseconds:")
    for name, seen in (("alone", quiet), (f"beside {HANGING} signals that hang", beside)):
        print(f"  {name:<34} p50 {median(seen):6.1f}   p99 {quantiles(seen, n=100)[98]:6.1f}")
    print(f"  ratio of the medians               {median(beside) / median(quiet):.2f}")


if __name__ == "__main__":
    main()
