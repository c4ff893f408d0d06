"""One real Postgres for the run, migrated once into a template; a fresh copy for each test."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

import pytest

from app.db.embedded import EmbeddedPostgres
from app.telemetry import set_up_logs
from tests.support.clock import ShiftedClock
from tests.support.databases import Databases
from tests.support.processes import folder_for_all, in_memory
from tests.support.queries import PRELOAD, QueryCount, count_queries
from tests.support.secrecy import LOGS
from tests.support.service import Service, running_service, test_settings

FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", **PRELOAD}


@pytest.fixture(scope="session", autouse=True)
def run_log() -> Iterator[TextIO]:
    """Everything that is said in this process, at debug level, for the test of secrecy."""
    with Path(LOGS, "tests.log").open("w") as log:
        set_up_logs("debug", "json", log)
        yield log


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """The server; TEST_POSTGRES_BIN names the programs of another version to test."""
    chosen = os.environ.get("TEST_POSTGRES_BIN", "")
    programs = Path(chosen) if chosen else None
    with (
        folder_for_all(in_memory()) as folder,  # a new database for each test
        EmbeddedPostgres(folder, binaries=programs, options=FAST) as server,
    ):
        yield server


@pytest.fixture(scope="session")
async def databases(postgres: EmbeddedPostgres) -> Databases:
    databases = Databases(postgres.url)
    await databases.prepare()
    return databases


@pytest.fixture
async def database_url(databases: Databases) -> AsyncIterator[str]:
    """A migrated, empty database."""
    async with databases.fresh() as url:
        yield url


@pytest.fixture
def queries(postgres: EmbeddedPostgres, database_url: str) -> QueryCount:
    """Counts the statements about tasks that ran in the test's database so far."""
    name = urlsplit(database_url).path.removeprefix("/")
    return lambda: count_queries(postgres.url, name)


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
async def service(database_url: str, clock: ShiftedClock) -> AsyncIterator[Service]:
    """A broker with default settings."""
    async with running_service(test_settings(database_url), clock) as service:
        yield service


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that reads the log of the whole run comes last."""
    items.sort(key=lambda item: item.path.name == "test_secrecy.py")
