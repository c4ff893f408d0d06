"""The broker that all clients use, and tools of it that are not for everybody."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.clients.tool_servers import demo_tools
from tests.support.processes import BrokerProcess, running_broker


@pytest.fixture(scope="package")
def broker() -> Iterator[BrokerProcess]:
    with running_broker("clients", demo=True) as broker:
        yield broker


@pytest.fixture(scope="package")
async def tools(broker: BrokerProcess) -> AsyncIterator[str]:
    """The URL of the gateway to tools that are not for everybody."""
    async with demo_tools(broker, "tools"):
        yield f"{broker.url}/mcp/tools"
