"""One Redis server, started for one run of one side, so that both sides find the same."""

from __future__ import annotations

import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import redis

from services.lib.redis_binary import find_redis_server

FAST: Mapping[str, str] = {"appendonly": "no", "save": ""}
DURABLE: Mapping[str, str] = {"appendonly": "yes", "appendfsync": "always", "save": ""}
REPLICATED: Mapping[str, str] = {
    **DURABLE,
    "min-replicas-to-write": "1",
    "min-replicas-max-lag": "2",
}
"""A master like this needs a replica."""
_START_SECONDS = 20.0


@contextmanager
def redis_server(settings: Mapping[str, str]) -> Iterator[str]:
    """Its address; the server, its replicas and their data are gone afterwards.

    Example: with redis_server(FAST) as url: ...
    """
    with _process(settings) as port, ExitStack() as replicas:
        for _ in range(int(settings.get("min-replicas-to-write", 0))):
            master = {"replicaof": f"127.0.0.1 {port}"}
            replicas.enter_context(_process({**settings, **master}))
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def _process(settings: Mapping[str, str]) -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="seamflow-bench-redis-") as folder:
        port = free_port()
        base = {"port": str(port), "bind": "127.0.0.1", "dir": folder}
        command = [find_redis_server()]
        for name, value in {**base, **settings}.items():
            command += [f"--{name}", *value.split(" ")]
        log = Path(folder, "server.log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _wait_until_it_answers(process, port, log)
            yield port
        finally:
            process.kill()
            process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    limit = time.monotonic() + _START_SECONDS
    with closing(redis.Redis(port=port)) as client:
        while process.poll() is None and time.monotonic() < limit:
            try:
                client.ping()
            except redis.ConnectionError:
                time.sleep(0.01)
            else:
                return
    raise RuntimeError(f"Redis did not start on port {port}:\n{log.read_text(errors='replace')}")


def free_port() -> int:
    """A port that nobody listens on now.

    Below the ports that the kernel gives to connections: one of those could take it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
