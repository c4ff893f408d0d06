"""A broker that may call back to loopback, and a tool server with a callback."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tests.support.callbacks import Callback, running_callback
from tests.support.clock import ShiftedClock
from tests.support.service import (
    McpClient,
    Service,
    ToolServer,
    running_service,
    test_settings,
)


@pytest.fixture
async def service(database_url: str, clock: ShiftedClock) -> AsyncIterator[Service]:
    settings = test_settings(database_url, allow_private_callbacks=True)
    async with running_service(settings, clock) as service:
        yield service


@pytest.fixture
async def callback(clock: ShiftedClock) -> AsyncIterator[Callback]:
    async with running_callback(clock) as callback:
        yield callback


@dataclass
class Stage:
    """Everybody who has to do with a signal."""

    service: Service
    tools: ToolServer
    client: McpClient
    callback: Callback


@pytest.fixture
async def stage(service: Service, callback: Callback) -> Stage:
    tools = await service.tool_server(callback_url=callback.url)
    callback.secrets.append(tools.webhook_secret)
    return Stage(service, tools, service.client(), callback)
