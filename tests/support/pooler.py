"""A pooler before the database: PgBouncer, which lends sessions out, one transaction at a time."""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

import asyncpg

from tests.support.processes import folder_for_all, free_port, listens, open_log
from tests.support.waiting import until

ACCOUNT = "nobody"
CONFIGURATION = """\
[databases]
* = host={host} port=5432 user={user}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {sessions}
max_client_conn = 500
"""


@asynccontextmanager
async def transaction_pooler(database_url: str, sessions: int = 5) -> AsyncIterator[str]:
    """The URL of the same database through a pooler in transaction mode."""
    if os.geteuid() == 0:  # as which it does not run
        await _let_in(database_url)
    direct = urlsplit(database_url)
    with _running(parse_qs(direct.query)["host"][0], direct.username or "", sessions) as place:
        yield urlunsplit(direct._replace(netloc=f"{direct.username}@{place}", query=""))


@contextmanager
def _running(host: str, user: str, sessions: int) -> Iterator[str]:
    """Where it listens."""
    port = free_port()
    with folder_for_all() as folder, open_log("pgbouncer") as log:
        configuration = folder / "pgbouncer.ini"
        settings = CONFIGURATION.format(host=host, user=user, port=port, sessions=sessions)
        configuration.write_text(settings)
        account = ["-u", ACCOUNT] if os.geteuid() == 0 else []
        command: list[str | Path] = [_program(), *account, configuration]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until(lambda: listens(port))
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait(30)


async def _let_in(database_url: str) -> None:
    """The embedded Postgres knows its clients by their operating-system user."""
    database = await asyncpg.connect(database_url)
    try:
        _append(await database.fetchval("SHOW ident_file"), f'taskbroker "{ACCOUNT}" taskbroker\n')
        await database.execute("SELECT pg_reload_conf()")
    finally:
        await database.close()


def _append(file: str, line: str) -> None:
    with Path(file).open("a") as opened:
        opened.write(line)


def _program() -> str:
    """Raises FileNotFoundError."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        raise FileNotFoundError("PgBouncer is not installed: apt-get install pgbouncer")
    return program
