"""The processes under test: started, killed, frozen, and ended with their parent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.harness.constants import VARIABLE
from bench.harness.redis_process import free_port
from services.lib.redis_binary import find_redis_server

ROOT = Path(__file__).parents[2]
_START_SECONDS = 120.0
_MANAGER = {"trajectory_manager.limits": {"START_SECONDS": 60.0, "SWEEP_SECONDS": 0.2}}
"""Waits of a manager whose Redis is killed, and whose leases are short."""
_LOOK_SECONDS = 0.005
# The kernel ends the child when the parent is gone, even if the parent was killed.
_TIED = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()


class Child:
    """STOPPED -> RUNNING -> STOPPED; the command stays the same over restarts."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        """Prepare `command`; its output goes to `folder/name.log`."""
        self.log = folder / f"{name}.log"
        self._command = [*_TIED, *command]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None, f"{self.log.stem} does not run"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it."""
        assert not self.running, f"{self.log.stem} runs already"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, cwd=ROOT
            )

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, such as SIGSTOP."""
        os.kill(self.pid, number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise RuntimeError(f"{self.log.stem} did not end; see {self.log}") from None
        finally:
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Server(Child):
    """A child that listens on a port of its own, the same over restarts."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        port: int,
        host: str = "127.0.0.1",
    ) -> None:
        """See `Child`; `host` and `port` are where it will listen."""
        super().__init__(name, command, folder, environment)
        self.port = port
        self.host = host

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"

    def __enter__(self) -> Self:
        super().__enter__()
        self.wait()
        return self

    def wait(self) -> None:
        """Return when it accepts connections."""
        limit = time.monotonic() + _START_SECONDS
        while not _listens(self.host, self.port):
            if not self.running or time.monotonic() > limit:
                tail = self.log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.log.stem} did not start on port {self.port}:\n{tail}")
            time.sleep(_LOOK_SECONDS)


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs `module`."""
    return [sys.executable, "-m", module, *arguments]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without anybody's seamflow settings, one thread, and `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEAMFLOW_")}
    path = os.pathsep.join((str(ROOT / "sdk"), str(ROOT)))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(extra or {})}


def manager(
    folder: Path,
    redis_url: str,
    *,
    durability: str = "durable",
    replicas: int = 1,
    module: str = "trajectory_manager",
    extra: Mapping[str, str] | None = None,
) -> Server:
    """`python -m trajectory_manager` on a Redis, not started; `extra` goes to its environment."""
    port = free_port()
    settings = {
        "SEAMFLOW_TRAJECTORY_MANAGER_PORT": str(port),
        "SEAMFLOW_TRAJECTORY_MANAGER_ADMIN_PORT": "-1",
        "SEAMFLOW_TRAJECTORY_MANAGER_REDIS_URL": redis_url,
        "SEAMFLOW_TRAJECTORY_MANAGER_DURABILITY": durability,
        "SEAMFLOW_TRAJECTORY_MANAGER_REPLICAS": str(replicas),
    }
    given = environment({**settings, VARIABLE: json.dumps(_MANAGER), **(extra or {})})
    command = python("bench.harness.constants", module)
    return Server(f"manager-{port}", command, folder, given, port)


def service(
    module: str,
    table: str,
    folder: Path,
    constants: Mapping[str, Mapping[str, object]] | None = None,
    /,
    **settings: object,
) -> Server:
    """`python -m module` with `settings` of its table, on a port of its own, not started.

    `constants` of modules are changed in it, by their names.
    """
    port = free_port()
    given = {"port": port, "admin_port": -1, "log_level": "warning", **settings}
    names = {f"SEAMFLOW_{table}_{name}".upper(): str(value) for name, value in given.items()}
    if not constants:
        return Server(table, python(module), folder, environment(names), port)
    names[VARIABLE] = json.dumps(constants)
    command = python("bench.harness.constants", module)
    return Server(table, command, folder, environment(names), port)


def redis_server(
    folder: Path,
    fsync: str = "always",
    fsync_milliseconds: int = 0,
    settings: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> Server:
    """A Redis with its append-only file in `folder`, not started.

    Every fsync takes `fsync_milliseconds` longer than the disk's; `settings` are added to its own.
    All its connections, to others too, are those of `host`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    given = {
        "port": str(port),
        "bind": host,
        "bind-source-addr": host,
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": fsync,
        "save": "",
        **(settings or {}),
    }
    command = [find_redis_server(), *(part for k, v in given.items() for part in (f"--{k}", v))]
    slow = {}
    if fsync_milliseconds:
        library = str(slow_fsync_library(folder))
        slow = {"LD_PRELOAD": library, "SLOW_FSYNC_MS": str(fsync_milliseconds)}
    return Server(f"redis-{port}", command, folder, environment(slow), port, host)


def redis_url(server: Server) -> str:
    """Its address for `redis_url` of a manager."""
    return f"redis://{server.address}/0"


def slow_fsync_library(folder: Path) -> Path:
    """`slow_fsync.c`, compiled.

    Raises:
        RuntimeError: there is no C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler for slow_fsync.c: install gcc, so that `cc` is on PATH")
    library = folder / "slow_fsync.so"
    source = Path(__file__).with_name("slow_fsync.c")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def _listens(host: str, port: int) -> bool:
    try:
        # From the address itself: a host that is cut off from others still reaches itself.
        with socket.create_connection((host, port), timeout=1, source_address=(host, 0)):
            return True
    except OSError:
        return False


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for logs and data that goes away with the run."""
    return tempfile.TemporaryDirectory(prefix="seamflow-chaos-", ignore_cleanup_errors=True)
