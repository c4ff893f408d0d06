"""A broker that accepts the tokens of an authorization server."""

from collections.abc import AsyncIterator

import pytest

from tests.support.authorization import PUBLIC_URL, AuthorizationServer, authorization_server
from tests.support.clock import ShiftedClock
from tests.support.service import Service, running_service, test_settings


@pytest.fixture
async def server(clock: ShiftedClock) -> AsyncIterator[AuthorizationServer]:
    async with authorization_server(clock) as server:
        yield server


@pytest.fixture
async def broker(
    server: AuthorizationServer, database_url: str, clock: ShiftedClock
) -> AsyncIterator[Service]:
    settings = test_settings(database_url, oauth_issuers=(server.issuer(),), public_url=PUBLIC_URL)
    async with running_service(settings, clock) as service:
        yield service
