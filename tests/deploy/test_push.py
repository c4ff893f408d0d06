"""Streams of the broker through a proxy that knows nothing of them: an nginx with its defaults."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.mcp import streams
from tests.deploy.proxies import nginx_program
from tests.mcp.test_listening import has_streams
from tests.support.clock import ShiftedClock
from tests.support.listening import listening
from tests.support.processes import folder_for_all, free_port, listens, open_log
from tests.support.service import Service, networked_service, test_settings
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.clients

CONFIGURATION = """\
daemon off;
pid nginx.pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server {{
        listen {port};
        {settings}
        location / {{
            proxy_pass {url};
        }}
    }}
}}
"""


@contextmanager
def nginx_before(url: str, settings: str = "") -> Iterator[str]:
    """The URL of an nginx with nothing set but where to pass requests on to."""
    port = free_port()
    with folder_for_all() as folder, open_log("nginx-defaults") as log:
        configuration = CONFIGURATION.format(port=port, url=url, settings=settings)
        (folder / "nginx.conf").write_text(configuration)
        command: list[str | Path] = [
            nginx_program(),
            "-p",
            folder,
            "-c",
            "nginx.conf",
            "-e",
            "stderr",
        ]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            until(lambda: listens(port))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
async def online(database_url: str, clock: ShiftedClock) -> AsyncIterator[Service]:
    """A broker on a real connection."""
    async with networked_service(test_settings(database_url), clock) as service:
        yield service


async def test_frames_arrive_at_once(online: Service) -> None:
    """By default nginx holds answers back; the broker asks it not to."""
    tools, client = await online.tool_server(), online.client()
    task = await tools.create(client)
    with nginx_before(str(online.http.base_url)) as url:
        async with (
            httpx.AsyncClient(base_url=url) as http,
            listening(http, client, [task.id]) as stream,
        ):
            assert await stream.acknowledged() == [task.id]
            assert (await stream.task())["status"] == "working"
            for number in range(3):
                await tools.report(task, statusMessage=f"step {number}")
                assert (await stream.task())["statusMessage"] == f"step {number}"
            await tools.complete(task)
            assert (await stream.task())["status"] == "completed"
            [end] = await stream.rest()
            assert end["result"]["resultType"] == "complete"


async def test_a_silent_stream_is_kept_open_by_its_signs_of_life(
    online: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each proxy ends what is silent for too long: this one after a second, by default after 60."""
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.3)
    tools, client = await online.tool_server(), online.client()
    task = await tools.create(client)
    with nginx_before(str(online.http.base_url), "proxy_read_timeout 1s;") as url:
        async with (
            httpx.AsyncClient(base_url=url) as http,
            listening(http, client, [task.id]) as stream,
        ):
            await stream.acknowledged()
            await stream.task()
            await eventually(lambda: stream.comments >= 8)
            await tools.complete(task)
            assert (await stream.task())["status"] == "completed"


async def test_a_client_that_leaves_the_proxy_leaves_the_broker(online: Service) -> None:
    tools, client = await online.tool_server(), online.client()
    task = await tools.create(client)
    with nginx_before(str(online.http.base_url)) as url:
        async with (
            httpx.AsyncClient(base_url=url) as http,
            listening(http, client, [task.id]) as stream,
        ):
            await stream.acknowledged()
            assert await has_streams(online, 1)
        await eventually(lambda: has_streams(online, 0))
