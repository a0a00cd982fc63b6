"""The Docker engine of `make test-compose`: the one that runs, or one for the time of the test."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.suites.compose.requirements import lacking, message, this_machine

_START_SECONDS = 60.0
_WEIGHTS = Path("/sys/fs/cgroup/cpu")
_WEIGHT_OF_A_PROCESS, _CONTAINERS = 1024, 20
_IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


class EngineUnavailableError(Exception):
    """This machine lacks something, or the engine does not start; the text has the cure."""


@contextmanager
def engine(data_root: Path) -> Iterator[bool]:
    """Have an engine; yields whether it was started here, with its images in `data_root`.

    Raises:
        EngineUnavailableError: something is missing, all of which the text names, or the engine
            does not start.
    """
    machine = this_machine()
    if needs := lacking(machine):
        raise EngineUnavailableError(message(needs))
    if machine.engine_answers:
        yield False
        return
    with _network_restored(), _own_engine(data_root):
        yield True


def _answers() -> bool:
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


@contextmanager
def _own_engine(data_root: Path) -> Iterator[None]:
    data_root.mkdir(parents=True, exist_ok=True)
    _weigh()
    socket = f"unix://{data_root}/docker.sock"
    os.environ["DOCKER_HOST"] = socket
    with (data_root / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "dockerd",
                *("--host", socket, "--pidfile", f"{data_root}/docker.pid"),
                *("--data-root", f"{data_root}/data", "--exec-root", f"{data_root}/exec"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        _wait_for(process, data_root)
        yield
    finally:
        process.terminate()
        process.wait()
        with suppress(OSError):
            (_WEIGHTS / "docker").rmdir()
        del os.environ["DOCKER_HOST"]


def _weigh() -> None:
    """Where cgroups are of version 1 all containers together weigh as much as one process.

    Here each weighs as a process of this machine, so that other work slows both alike.
    """
    if (_WEIGHTS / "cpu.shares").exists():
        (_WEIGHTS / "docker").mkdir(exist_ok=True)
        (_WEIGHTS / "docker" / "cpu.shares").write_text(str(_WEIGHT_OF_A_PROCESS * _CONTAINERS))


def _wait_for(process: subprocess.Popen[bytes], data_root: Path) -> None:
    limit = time.monotonic() + _START_SECONDS
    while not _answers():
        if process.poll() is not None or time.monotonic() > limit:
            raise EngineUnavailableError(f"dockerd did not start: see {data_root}/dockerd.log")
        time.sleep(0.5)


@contextmanager
def _network_restored() -> Iterator[None]:
    """The engine leaves packet filter rules and forwarding behind; put back what was there."""
    forwarding = _IP_FORWARD.read_text()
    rules = subprocess.run(["iptables-save"], capture_output=True, check=True).stdout
    try:
        yield
    finally:
        subprocess.run(["iptables-restore"], input=rules, check=True)
        for table in ("filter", "nat"):
            if f"*{table}".encode() not in rules:
                subprocess.run(["iptables", "-t", table, "-F"], check=True)
                subprocess.run(["iptables", "-t", table, "-X"], check=True)
                if table == "filter":  # the engine drops what it does not forward itself
                    subprocess.run(["iptables", "-P", "FORWARD", "ACCEPT"], check=True)
        _IP_FORWARD.write_text(forwarding)
        subprocess.run(["ip", "link", "delete", "docker0"], capture_output=True, check=False)
