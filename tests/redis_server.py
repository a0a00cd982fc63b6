"""A private Redis server for tests: real, on a free port, killed and restarted at will."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from services.chassis.redis_binary import find_redis_server

__all__ = ["RedisServer"]

_START_SECONDS = 20.0


class RedisServer:
    """STOPPED -> RUNNING -> STOPPED, moved by `start`, `kill`, `stop`; data stays in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Prepare a server that keeps its append-only file in `folder`."""
        self._folder = folder
        self._port = _free_port()
        self._appendfsync = "everysec"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for `services.chassis.redis.connect`, the same after a restart."""
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        """Process id of the running server, for signals."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self, appendfsync: str = "everysec") -> None:
        """Start it on its data and wait until it answers."""
        assert self._process is None, "the server is already running"
        self._appendfsync = appendfsync
        self._folder.mkdir(parents=True, exist_ok=True)
        arguments = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": appendfsync,
            "save": "",
        }
        command = [find_redis_server()]
        for name, value in arguments.items():
            command += [f"--{name}", value]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._wait_until_it_answers()

    def kill(self) -> None:
        """End it as a crash would: SIGKILL."""
        self._end(subprocess.Popen.kill)

    def stop(self) -> None:
        """End it in order, with its data on disk; nothing happens if it does not run."""
        self._end(subprocess.Popen.terminate)

    def restart(self) -> None:
        """Stop it if it runs, and start it on the same data with the same fsync policy."""
        self.stop()
        self.start(self._appendfsync)

    def _end(self, how: Callable[[subprocess.Popen[bytes]], None]) -> None:
        if self._process is None:
            return
        how(self._process)
        self._process.wait()
        self._process = None

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        limit = time.monotonic() + _START_SECONDS
        while time.monotonic() < limit and self._process.poll() is None:
            if _answers(self._port):
                return
            time.sleep(0.01)
        log = (self._folder / "server.log").read_text(errors="replace")
        raise RuntimeError(f"Redis did not start on port {self._port}:\n{log[-2000:]}")


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
