"""The broker's data folder: who owns it at the moment, and the secrets that are kept in it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

Role = Literal["serve", "command"]

_POLL_SECONDS = 0.02
# running() tests the lock by taking it for an instant; nobody may be refused because of that.
_PROBE_GRACE_SECONDS = 0.5


class DataDirInUse(Exception):
    """Another broker process owns the folder and does not let go of it."""


class DataDir:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        create_folder(self.path)
        self._lock = self.path / "lock"
        self._runtime = self.path / "runtime.json"
        self._owner: dict[str, Any] = {}

    @contextmanager
    def claim(self, role: Role, wait: float) -> Iterator[None]:
        """Own the folder. A command's turn is waited for; a running server refuses at once."""
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._acquire(lock, wait)
            self._owner = {"role": role, "pid": os.getpid()}
            try:
                self._runtime.unlink(missing_ok=True)
                os.ftruncate(lock, 0)
                os.pwrite(lock, json.dumps(self._owner).encode(), 0)
                yield
            finally:
                self._owner = {}
                self._runtime.unlink(missing_ok=True)
                os.ftruncate(lock, 0)
        finally:
            os.close(lock)

    def publish(self, url: str) -> None:
        """Tell other processes where the owner's database is, now that it is ready and migrated."""
        if not self._owner:
            raise RuntimeError("only the owner of the data folder may publish its database")
        with self._staged(json.dumps({**self._owner, "databaseUrl": url})) as staged:
            staged.replace(self._runtime)

    def running(self, wait: float) -> str | None:
        """The database URL of the server that owns the folder; None when nobody owns it."""
        deadline = time.monotonic() + wait
        while not self._is_free():
            holder, published = self._holder(), _read(self._runtime)
            if holder.get("role") == "serve" and published.get("pid") == holder["pid"]:
                return str(published["databaseUrl"])
            if time.monotonic() > deadline:
                raise self._in_use(holder)
            time.sleep(_POLL_SECONDS)
        return None

    def secret_keys(self) -> str:
        """The keys kept in the folder, newest first; a first one is made when there is none."""
        path = self.path / "secret-keys"
        if not path.exists():
            key = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
            # A link never replaces: whoever comes second reads the first one's key.
            with self._staged(f"{key}\n") as staged, suppress(FileExistsError):
                path.hardlink_to(staged)
        return path.read_text().strip()

    def _acquire(self, lock: int, wait: float) -> None:
        deadline = time.monotonic() + max(wait, _PROBE_GRACE_SECONDS)
        while not _try_lock(lock, fcntl.LOCK_EX):
            holder = self._holder()
            if holder.get("role") == "serve" or time.monotonic() > deadline:
                raise self._in_use(holder)
            time.sleep(_POLL_SECONDS)

    def _is_free(self) -> bool:
        try:
            lock = os.open(self._lock, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            return _try_lock(lock, fcntl.LOCK_SH)
        finally:
            os.close(lock)

    def _holder(self) -> dict[str, Any]:
        """What the lock's holder wrote; empty between two owners and after a kill -9."""
        holder = _read(self._lock)
        return holder if is_alive(holder.get("pid", 0)) else {}

    def _in_use(self, holder: dict[str, Any]) -> DataDirInUse:
        who = "`taskbroker {role}`, process {pid}".format(**holder) if holder else "another broker"
        return DataDirInUse(f"{self.path} is in use by {who}")

    @contextmanager
    def _staged(self, text: str) -> Iterator[Path]:
        """A complete file (mode 0600) beside its final place, to be moved or linked there."""
        descriptor, name = tempfile.mkstemp(prefix=".new-", dir=self.path)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)


def create_folder(path: Path) -> None:
    """Create a private folder; root's must be passable for the user that runs its Postgres."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o711 if os.geteuid() == 0 else 0o700)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and somebody else's
    return pid > 0


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_text()))
    return {}


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
