"""The data folder among real processes: one owner, its address, its keys."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from app.db.data_dir import DataDir, DataDirInUse, Role

ROOT = Path(__file__).parents[2]
URL = "postgresql://taskbroker@/taskbroker?host=/run/x"

# Holds the folder until its input ends, and does what it is told on the way.
HOLDER = f"""
import subprocess, sys
from pathlib import Path
from app.db.data_dir import DataDir
data_dir = DataDir(Path(sys.argv[1]))
with data_dir.claim(sys.argv[2], wait=10):
    print("held", flush=True)
    for line in sys.stdin:
        if line == "publish\\n":
            data_dir.publish({URL!r})
            print("published", flush=True)
        else:
            child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
            print(child.pid, flush=True)
"""

KEY_MAKER = """
import sys
from pathlib import Path
from app.db.data_dir import DataDir
data_dir = DataDir(Path(sys.argv[1]))
print("here", flush=True)
sys.stdin.readline()
print(data_dir.secret_keys(), flush=True)
"""


class Process:
    def __init__(self, code: str, *arguments: str | Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hears(self, expected: str) -> None:
        assert self.line() == expected

    def line(self) -> str:
        assert self.popen.stdout
        return self.popen.stdout.readline().strip()

    def say(self, text: str) -> None:
        assert self.popen.stdin
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)

    def end(self) -> None:
        with self.popen:
            pass


@contextmanager
def holder(folder: Path, role: str) -> Iterator[Process]:
    process = Process(HOLDER, folder, role)
    try:
        process.hears("held")
        yield process
    finally:
        process.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_private(folder: Path) -> None:
    DataDir(folder)
    assert mode(folder) == (0o711 if os.geteuid() == 0 else 0o700)


def test_a_folder_that_exists_keeps_its_mode(folder: Path) -> None:
    folder.mkdir(mode=0o750)
    DataDir(folder)
    assert mode(folder) == 0o750


def test_a_second_server_is_refused_at_once(folder: Path) -> None:
    with holder(folder, "serve") as first:
        begun = time.monotonic()
        with pytest.raises(DataDirInUse) as refusal, DataDir(folder).claim("serve", wait=30):
            pass
        assert time.monotonic() - begun < 5
    assert str(folder) in str(refusal.value)
    assert f"process {first.popen.pid}" in str(refusal.value)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set when somebody in this process begins to wait."""
    event, sleep = Event(), time.sleep

    def noticed(seconds: float) -> None:
        event.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noticed)
    return event


@pytest.mark.parametrize("role", ["serve", "command"])
def test_the_end_of_a_command_is_waited_for(folder: Path, role: Role, waiting: Event) -> None:
    def claim() -> str:
        with DataDir(folder).claim(role, wait=20):
            return (folder / "lock").read_text()

    with holder(folder, "command") as first, ThreadPoolExecutor() as threads:
        second = threads.submit(claim)
        assert waiting.wait(10)
        assert not second.done()
        first.end()
        assert json.loads(second.result(10)) == {"role": role, "pid": os.getpid()}


def test_a_command_that_takes_too_long_is_named(folder: Path) -> None:
    with holder(folder, "command") as first:
        named = pytest.raises(DataDirInUse, match=f"process {first.popen.pid}")
        with named, DataDir(folder).claim("command", wait=0):
            pass


def test_nobody_runs(folder: Path) -> None:
    assert DataDir(folder).running(wait=0) is None


def test_a_command_beside_a_server_gets_its_database(folder: Path, waiting: Event) -> None:
    with holder(folder, "serve") as server, ThreadPoolExecutor() as threads:
        asked = threads.submit(DataDir(folder).running, 20)
        assert waiting.wait(10)
        server.say("publish")
        assert asked.result(10) == URL
        assert mode(folder / "runtime.json") == 0o600
        assert json.loads((folder / "runtime.json").read_text()) == {
            "pid": server.popen.pid,
            "role": "serve",
            "databaseUrl": URL,
        }
    assert not (folder / "runtime.json").exists()
    assert DataDir(folder).running(wait=0) is None


def test_a_command_waits_for_another_command(folder: Path, waiting: Event) -> None:
    with holder(folder, "command") as command, ThreadPoolExecutor() as threads:
        command.say("publish")
        command.hears("published")
        with pytest.raises(DataDirInUse):
            DataDir(folder).running(wait=0)
        waiting.clear()
        asked = threads.submit(DataDir(folder).running, 20)
        assert waiting.wait(10)
        command.end()
        assert asked.result(10) is None


def test_what_a_killed_server_left_is_not_trusted(folder: Path) -> None:
    with holder(folder, "serve") as server:
        server.say("publish")
        server.hears("published")
        server.kill()
    stale = (folder / "runtime.json").read_text()
    assert DataDir(folder).running(wait=0) is None
    with holder(folder, "serve"):
        assert not (folder / "runtime.json").exists()
        (folder / "runtime.json").write_text(stale)
        with pytest.raises(DataDirInUse):
            DataDir(folder).running(wait=0)


def test_children_do_not_inherit_the_lock(folder: Path) -> None:
    with holder(folder, "serve") as server:
        server.say("spawn")
        child = int(server.line())
        server.kill()
        try:
            assert DataDir(folder).running(wait=0) is None
        finally:
            os.kill(child, signal.SIGKILL)


def test_only_the_owner_publishes(folder: Path) -> None:
    data_dir = DataDir(folder)
    with data_dir.claim("command", wait=0):
        pass
    with pytest.raises(RuntimeError):
        data_dir.publish(URL)


def test_keys_are_made_once_and_kept_private(folder: Path) -> None:
    keys = DataDir(folder).secret_keys()
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", keys)
    assert len(base64.urlsafe_b64decode(keys + "=")) == 32
    assert mode(folder / "secret-keys") == 0o600
    assert DataDir(folder).secret_keys() == keys
    assert [path.name for path in folder.iterdir()] == ["secret-keys"]


def test_keys_of_the_operator_are_used(folder: Path) -> None:
    data_dir = DataDir(folder)
    (folder / "secret-keys").write_text("new,old\n")
    assert data_dir.secret_keys() == "new,old"


def test_processes_that_race_get_the_same_keys(folder: Path) -> None:
    makers = [Process(KEY_MAKER, folder) for _ in range(4)]
    for maker in makers:
        maker.hears("here")
    for maker in makers:
        maker.say("go")
    answers = {maker.line() for maker in makers}
    for maker in makers:
        maker.end()
    assert answers == {DataDir(folder).secret_keys()}
