"""From an event to the frame of who listens, with replicas, with many streams, and with churn.

1. From the 2xx of an event to its frame at a `subscriptions/listen` stream. Events are sent to
   one replica, one at a time, in turns about tasks whose streams are open on that replica and on
   another one; the ratio of the medians says what the way between replicas costs.
2. Many streams on one process, each about a task of its own: what a stream takes of memory, and of
   the processor while nothing happens and while each task gets an event; how late frames are, and
   how `tasks/get` does beside all that, in one connection that polls at a steady pace.
3. Streams that are opened and dropped as fast as can be; what is left of them. Anything makes the
   exit code 1.

Cores as in `run.py`: the generator has the first one, all brokers share the others.
"""

import argparse
import asyncio
import base64
import gc
import os
import resource
import secrets
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median, quantiles

import uvloop

from app.db.embedded import EmbeddedPostgres
from app.db.migrations import migrate
from app.main import create_broker
from app.settings import Settings
from benchmarks import corpus, servers
from benchmarks.corpus import Corpus, StoredTask
from benchmarks.deliveries import Client
from benchmarks.servers import Served

REPLICAS = (2, 4)
LISTENERS = 100
EVENTS_EACH = 4
AT_A_TIME = 64  # streams that are being opened
SENDERS = 8
POLLS_A_SECOND = 100
CHURN_ROUNDS = 2
PATIENCE = 30.0
SPARE_FILES = 200
LAZY_CONNECTIONS = 10  # to the database, made when they are first needed


class Options(argparse.Namespace):
    streams: int
    seconds: int
    idle_seconds: int
    poll_seconds: int
    churn: int


class Listener(asyncio.Protocol):
    """An open stream about one task."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[float] = asyncio.Queue()
        """When each frame about the task has come."""
        self.gone = asyncio.Event()
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"refused: {line!r}")
            if line.startswith(b"data: ") and b'"notifications/tasks"' in line:
                self.frames.put_nowait(time.perf_counter())

    def connection_lost(self, _reason: Exception | None) -> None:
        self.gone.set()

    async def frame(self) -> float:
        """When the next frame came."""
        async with asyncio.timeout(PATIENCE):
            return await self.frames.get()


@asynccontextmanager
async def listening(port: int, request: bytes) -> AsyncIterator[Listener]:
    """A stream that has told how its task is; dropped at the end."""
    loop = asyncio.get_running_loop()
    transport, listener = await loop.create_connection(Listener, "127.0.0.1", port)
    try:
        transport.write(request)
        await listener.frame()
        yield listener
    finally:
        transport.abort()
        await listener.gone.wait()


async def in_parallel(number: int, work: Callable[[], Coroutine[None, None, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(work())


@asynccontextmanager
async def many_streams(port: int, tasks: list[StoredTask]) -> AsyncIterator[list[Listener]]:
    """A stream for each of these tasks, in their order."""
    opened: dict[int, Listener] = {}
    left = iter(enumerate(corpus.listens(tasks)))
    async with AsyncExitStack() as stack:

        async def open_them() -> None:
            for number, request in left:
                opened[number] = await stack.enter_async_context(listening(port, request))

        await in_parallel(AT_A_TIME, open_them)
        yield [opened[number] for number in range(len(tasks))]


async def connect(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port))


@dataclass
class Process:
    """A broker as the system and its own metrics see it."""

    served: Served

    @property
    def rss(self) -> int:
        """Bytes of memory."""
        pages = int(Path(f"/proc/{self.served.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    @property
    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.served.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.served.pid}/fd").iterdir())

    async def held(self) -> dict[str, int]:
        """Its streams and waiters, by its metrics, and its descriptors."""
        url = f"http://127.0.0.1:{self.served.port}/metrics"
        answer = await asyncio.to_thread(urllib.request.urlopen, url)
        with answer:
            lines = answer.read().decode().splitlines()
        pairs = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {
            "streams": int(float(pairs["taskbroker_streams"])),
            "waiters": int(float(pairs["taskbroker_waiters"])),
            "descriptors": self.descriptors,
        }


def ms(seen: list[float]) -> str:
    """The quantiles of so many seconds, in milliseconds."""
    p99 = quantiles(seen, n=100)[98]
    return f"p50 {median(seen) * 1e3:7.2f}   p99 {p99 * 1e3:7.2f}   worst {max(seen) * 1e3:7.2f}"


def line(name: str, figures: str) -> None:
    print(f"  {name:<42} {figures}", flush=True)


# --- one replica and another ----------------------------------------------------------------


async def between_replicas(brokers: list[Served], stored: Corpus) -> None:
    """Events to the first replica; streams there, and on the others in turns."""
    here, elsewhere = stored.live[:LISTENERS], stored.live[LISTENERS : 2 * LISTENERS]
    from_sending: dict[str, list[float]] = {"the same": [], "another": []}
    from_answer: dict[str, list[float]] = {"the same": [], "another": []}
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(many_streams(brokers[0].port, here))
        far = []
        for number, task in enumerate(elsewhere):
            port = brokers[1 + number % (len(brokers) - 1)].port
            far += await stack.enter_async_context(many_streams(port, [task]))
        client = await connect(brokers[0].port)
        for _ in range(EVENTS_EACH):
            places = (("the same", here, near), ("another", elsewhere, far))
            rounds = {
                name: list(corpus.events(tasks, stored.webhook_key, LISTENERS))
                for name, tasks, _ in places
            }
            for number in range(LISTENERS):
                for name, _, listeners in places:
                    sent = await client.send(rounds[name][number])
                    answered = time.perf_counter()
                    came = await listeners[number].frame()
                    from_sending[name].append(came - sent)
                    from_answer[name].append(came - answered)
    for what, seen in (("sent", from_sending), ("2xx", from_answer)):
        for name, delays in seen.items():
            line(f"{len(brokers)} replicas, {what} to frame at {name}", ms(delays))
        ratio = median(seen["another"]) / median(seen["the same"])
        line("  ratio of the medians", f"{ratio:.2f}")


# --- many streams ---------------------------------------------------------------------------


async def paced(a_second: float, ends: float = float("inf")) -> AsyncIterator[int]:
    """Numbers, so many a second, until that time of the loop."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    for number in count():
        due = start + number / a_second
        if due > ends:
            return
        await asyncio.sleep(due - loop.time())
        yield number


async def polls(port: int, tasks: list[StoredTask], seconds: float) -> list[float]:
    """Seconds that each `tasks/get` took, in one connection."""
    client, requests = await connect(port), list(corpus.gets(tasks))
    seen = []
    async for number in paced(POLLS_A_SECOND, asyncio.get_running_loop().time() + seconds):
        sent = await client.send(requests[number % len(requests)])
        seen.append(time.perf_counter() - sent)
    return seen


async def rush(port: int, stored: Corpus, listeners: list[Listener], seconds: float) -> list[float]:
    """One event for each task, evenly over the time; seconds from each 2xx to its frame."""
    number_of = len(listeners)
    requests = list(corpus.events(stored.reported, stored.webhook_key, number_of))
    answered = [0.0] * number_of
    turns = paced(number_of / seconds)
    turn = asyncio.Lock()

    async def send_them() -> None:
        client = await connect(port)
        while True:
            async with turn:
                number = await anext(turns)
            if number >= number_of:
                return
            await client.send(requests[number])
            answered[number] = time.perf_counter()

    await in_parallel(SENDERS, send_them)
    return [await one.frame() - answered[number] for number, one in enumerate(listeners)]


async def many(served: Served, stored: Corpus, options: Options) -> None:
    process, port = Process(served), served.port
    tasks = stored.reported[: options.streams]

    async with many_streams(port, stored.live[:AT_A_TIME]):  # what is needed once is there
        alone = await polls(port, stored.live, options.poll_seconds)
    before = process.rss
    started = time.perf_counter()
    async with many_streams(port, tasks) as listeners:
        opening = time.perf_counter() - started
        idle = await load(process, asyncio.sleep(options.idle_seconds))
        per_stream = (process.rss - before) / len(tasks)
        beside = await polls(port, stored.live, options.poll_seconds)
        polling = asyncio.create_task(polls(port, stored.live, options.seconds))
        delays: list[float] = []

        async def events() -> None:
            delays.extend(await rush(port, stored, listeners, options.seconds))

        busy = await load(process, events())
        during = await polling
    line("opened, a second", f"{len(tasks) / opening:.0f}")
    line("memory of a stream", f"{per_stream / 1024:.1f} KiB")
    line("of a core, while nothing happens", f"{idle:.1%}")
    line(f"of a core, with {len(tasks) / options.seconds:.0f} events a second", f"{busy:.1%}")
    line("2xx to frame", ms(delays))
    for name, seen in (("alone", alone), ("beside idle streams", beside), ("and events", during)):
        ratio = median(seen) / median(alone)
        line(f"tasks/get {name}", f"{ms(seen)}   ratio {ratio:.2f}")


async def load(process: Process, work: Coroutine[None, None, None]) -> float:
    """The part of a core that a broker took during this."""
    started, before = time.perf_counter(), process.processor_seconds
    await work
    return (process.processor_seconds - before) / (time.perf_counter() - started)


# --- churn ----------------------------------------------------------------------------------


async def churn(served: Served, stored: Corpus, streams: int) -> bool:
    """Opens and drops streams; whether something is left of them."""
    process = Process(served)
    await process.held()
    before = await process.held()
    line("before", _told(before, process))
    for number in range(1, CHURN_ROUNDS + 1):
        started = time.perf_counter()
        left = iter(corpus.listens(stored.live[:streams]))
        await in_parallel(AT_A_TIME, partial(_drop, served.port, left))
        spent = time.perf_counter() - started
        after = await process.held()
        until = time.monotonic() + PATIENCE
        while _leaks(before, after) and time.monotonic() < until:
            after = await process.held()
        line(f"after {number * streams}", f"{_told(after, process)}   {streams / spent:.0f}/s")
    return _leaks(before, after)


def _leaks(before: dict[str, int], after: dict[str, int]) -> bool:
    more = {name: after[name] - before[name] for name in before}
    return more.pop("descriptors") > LAZY_CONNECTIONS or any(more.values())


async def _drop(port: int, requests: Iterable[bytes]) -> None:
    for request in requests:
        async with listening(port, request):
            pass


def _told(held: dict[str, int], process: Process) -> str:
    counts = "   ".join(f"{name} {number}" for name, number in held.items())
    return f"{counts}   {process.rss / 2**20:.0f} MiB"


# --- all of it ------------------------------------------------------------------------------


def read_options() -> Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--streams", type=int, default=2_000, help="on one process")
    add("--seconds", type=int, default=8, help="in which each of their tasks gets an event")
    add("--idle-seconds", type=int, default=15, help="in which nothing happens")
    add("--poll-seconds", type=int, default=4, help="of polls alone, and beside idle streams")
    add("--churn", type=int, default=2_000, help="streams to open and drop in each round")
    return parser.parse_args(namespace=Options())


def allow_files(needed: int) -> None:
    """Lets us and the brokers have so many files open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < needed:
        sys.exit(f"{needed} files have to be open at once, and the system allows {most}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


@servers.on_cores(generator=True)
def main() -> None:
    options = read_options()
    gc.disable()  # our own pauses would be taken for the broker's
    allow_files(options.streams + SPARE_FILES)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="taskbroker-bench-"))
        postgres = stack.enter_context(EmbeddedPostgres(Path(folder) / "data"))
        asyncio.run(migrate(postgres.url))
        key = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
        settings = Settings.model_validate(
            {
                "database_url": postgres.url,
                "secret_keys": (key,),
                "max_streams_per_owner": options.streams,
            }
        )
        tasks = max(options.streams, options.churn, 2 * LISTENERS)
        stored = asyncio.run(corpus.store(create_broker(settings), settings, tasks, 0))
        print("from an event to its frame, milliseconds:")
        for replicas in REPLICAS:
            with ExitStack() as running:
                brokers = [
                    running.enter_context(servers.replica(settings)) for _ in range(replicas)
                ]
                uvloop.run(between_replicas(brokers, stored))
        print(f"{options.streams} streams on one process, milliseconds:")
        with servers.replica(settings) as served:
            uvloop.run(many(served, stored, options))
        print(f"streams that are opened and dropped, {AT_A_TIME} at a time:")
        with servers.replica(settings) as served:
            leaks = uvloop.run(churn(served, stored, options.churn))
    if leaks:
        sys.exit("something is left of streams that were dropped")


if __name__ == "__main__":
    main()
