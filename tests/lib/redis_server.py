"""A private Redis server for tests: real, on a free port, killed and restarted at will."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from services.lib.redis_binary import find_redis_server

_START_SECONDS = 20.0
# Each port once, in an order of its own for each process, so that two of them seldom meet; workers
# of one session (pytest -n) share the ports, so that these two never do.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_SHARE = range(12_000 + _WORKER, 32_000, _WORKERS)
_PORTS = iter(random.sample(_SHARE, len(_SHARE)))
_RUNNING: set[int] = set()


class RedisServer:
    """STOPPED -> RUNNING -> STOPPED, moved by `start`, `kill`, `stop`; data stays in `folder`."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        """Prepare a server that keeps its append-only file in `folder`, with more `settings`."""
        self._folder = folder
        self.settings = dict(settings or {})
        self.port = free_port()
        self._appendfsync = "everysec"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for `services.chassis.redis.connect.connect`, the same after a restart."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def runs(self) -> bool:
        """Whether it was started and not ended."""
        return self._process is not None

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
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": appendfsync,
            "save": "",
            **self.settings,
        }
        command = [find_redis_server()]
        for name, value in arguments.items():
            command += [f"--{name}", value]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        _RUNNING.add(self.port)
        self._wait_until_it_answers()

    def kill(self) -> None:
        """End it as a crash would: SIGKILL."""
        self._end(subprocess.Popen.kill)

    def stop(self) -> None:
        """End it in order, with its data on disk; nothing happens if it does not run."""
        self._end(subprocess.Popen.terminate)

    def freeze(self) -> None:
        """Keep it from doing anything, as a partition does: SIGSTOP. Its peers see silence."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """End `freeze`."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Stop it if it runs, and start it on the same data with the same fsync policy."""
        self.stop()
        self.start(self._appendfsync)

    def _end(self, how: Callable[[subprocess.Popen[bytes]], None]) -> None:
        if self._process is None:
            return
        how(self._process)
        # A frozen process ends by SIGKILL only; thawed, it ends in order.
        self._process.send_signal(signal.SIGCONT)
        self._process.wait()
        self._process = None
        _RUNNING.discard(self.port)

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        limit = time.monotonic() + _START_SECONDS
        while time.monotonic() < limit and self._process.poll() is None:
            if _answers(self.port):
                return
            time.sleep(0.01)
        log = (self._folder / "server.log").read_text(errors="replace")
        raise RuntimeError(f"Redis did not start on port {self.port}:\n{log[-2000:]}")


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


def running_ports() -> frozenset[int]:
    """The ports of the servers of this process that run."""
    return frozenset(_RUNNING)


def free_port() -> int:
    """A port that nobody listens on now and that was not given before.

    Below the ports that the kernel gives to connections: one of those could take it meanwhile.
    """
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("every port of this process was given away")
