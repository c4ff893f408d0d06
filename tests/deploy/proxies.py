"""The proxies of `deploy/`, started for real with the files that are shipped."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ROOT, folder_for_all, free_port, listens, open_log
from tests.support.waiting import until

PUBLIC_NAME = "mcp.example.com"
RECIPES = ROOT / "deploy"
PROGRAMS = ROOT / ".venv-ingress/bin"
NGINX_MAIN = """\
daemon off;
pid nginx.pid;
events {}
http {
    access_log /dev/stderr;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include taskbroker.conf;
}
"""


@dataclass(frozen=True)
class Ports:
    """What stands behind the three port numbers that all recipes use."""

    public: int
    broker: int
    tool_server: int

    def put_into(self, recipe: str) -> str:
        chosen = {"8000": self.public, "8080": self.broker, "9000": self.tool_server}
        return re.sub(r"\b(8000|8080|9000)\b", lambda number: str(chosen[number[0]]), recipe)


def nginx(folder: Path, ports: Ports) -> list[str | Path]:
    _copy("nginx/taskbroker.conf", folder, ports)
    (folder / "nginx.conf").write_text(NGINX_MAIN)
    return [nginx_program(), "-p", folder, "-c", "nginx.conf", "-e", "stderr"]


def envoy(folder: Path, ports: Ports) -> list[str | Path]:
    recipe = _copy("envoy/envoy.yaml", folder, ports)
    return [PROGRAMS / "envoy", "-c", recipe, "--concurrency", "1", "--disable-hot-restart"]


def traefik(folder: Path, ports: Ports) -> list[str | Path]:
    routes = _copy("traefik/dynamic.yaml", folder, ports)
    static = _copy("traefik/traefik.yaml", folder, ports)
    static.write_text(static.read_text().replace("/etc/traefik/dynamic.yaml", str(routes)))
    return [PROGRAMS / "traefik", f"--configfile={static}"]


def caddy(folder: Path, ports: Ports) -> list[str | Path]:
    recipe = _copy("caddy/Caddyfile", folder, ports)
    return [PROGRAMS / "caddy", "run", "--adapter", "caddyfile", "--config", recipe]


PROXIES = {"nginx": nginx, "envoy": envoy, "traefik": traefik, "caddy": caddy}


@contextmanager
def running_proxy(name: str, ports: Ports) -> Iterator[Path]:
    """A proxy that listens; the log that it writes."""
    with folder_for_all() as folder, open_log(name) as log:
        command = PROXIES[name](folder, ports)
        surroundings = {"HOME": str(folder), "CADDY_ADMIN": f"127.0.0.1:{free_port()}"}
        process = subprocess.Popen(command, cwd=folder, env=surroundings, stdout=log, stderr=log)
        try:
            until(lambda: _listens(process, ports.public, log.name))
            yield Path(log.name)
        finally:
            process.terminate()
            process.wait(30)


def _listens(process: subprocess.Popen[bytes], port: int, log: str) -> bool:
    assert process.poll() is None, f"the proxy ended, see {log}"
    return listens(port)


def _copy(recipe: str, folder: Path, ports: Ports) -> Path:
    """The recipe with other ports, in the folder."""
    copy = folder / Path(recipe).name
    copy.write_text(ports.put_into((RECIPES / recipe).read_text()))
    return copy


def nginx_program() -> str:
    """Raises FileNotFoundError."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise FileNotFoundError("nginx is not installed: apt-get install nginx")
    return program
