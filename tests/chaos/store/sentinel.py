"""One master, two replicas and three Sentinels: real processes on addresses of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from bench.harness import processes
from bench.harness.processes import Server
from bench.harness.redis_process import free_port
from services.lib.redis_binary import find_redis_server

SERVICE = "seamflow"
SAFE = {"min-replicas-to-write": "2", "min-replicas-max-lag": "2"}
"""What `replicated` asks of its servers: an isolated master stops to write."""

_QUICK = {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
_NUM_REPLICAS, _NUM_SENTINELS, _QUORUM = 2, 3, 2
_READY_SECONDS = 60.0
_LOOK_SECONDS = 0.05


class Sentinels:
    """`servers[0]` is the first master; the Sentinels run beside its replicas."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str],
        *,
        master_host: str = "127.0.0.1",
        other_host: str = "127.0.0.1",
    ) -> None:
        """Prepare all processes, with more `settings` for the servers, such as `SAFE`."""
        common = {**_QUICK, **settings}
        master = processes.redis_server(folder / "server-0", "always", 0, common, master_host)
        follow = {**common, "replicaof": f"{master_host} {master.port}"}
        replicas = [
            processes.redis_server(folder / f"server-{i + 1}", "always", 0, follow, other_host)
            for i in range(_NUM_REPLICAS)
        ]
        self.servers = [master, *replicas]
        self.sentinels = [_sentinel(folder, master, other_host) for _ in range(_NUM_SENTINELS)]
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """Address for `redis_url`."""
        hosts = ",".join(sentinel.address for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def master(self) -> Server:
        """The server that the first Sentinel calls the master."""
        with _client(self.sentinels[0]) as sentinel:
            _, port = sentinel.sentinel_get_master_addr_by_name(SERVICE)
        return next(server for server in self.servers if server.port == port)

    def wait(self) -> None:
        """Return when the master has all its replicas and every Sentinel knows of it."""
        _wait(lambda: all(map(_knows_all, self.sentinels)) and _replicas(self.master()))

    def promote_another(self) -> None:
        """Promote a replica while the master lives, as Sentinels do that wrongly think it dead."""
        before = self.master()
        with _client(self.sentinels[0]) as sentinel:
            # Refused for as long as it thinks that no replica would do.
            _wait(lambda: bool(sentinel.execute_command("SENTINEL", "FAILOVER", SERVICE)))
        self.wait_for_other_than(before)

    def wait_for_other_than(self, before: Server) -> None:
        """Return when the first Sentinel calls another server the master."""
        _wait(lambda: self.master() is not before)

    def failed_over(self) -> bool:
        """Whether a Sentinel has switched to another master; needs no connection to it."""
        return any(b"+switch-master" in sentinel.log.read_bytes() for sentinel in self.sentinels)

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            for server in self.servers:
                starting.enter_context(server)
            _wait(lambda: _replicas(self.servers[0]))
            for sentinel in self.sentinels:
                starting.enter_context(sentinel)
            self._stack = starting.pop_all()
            self.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _sentinel(folder: Path, master: Server, host: str) -> Server:
    port = free_port()
    # A Sentinel rewrites its configuration, so each has a file of its own.
    config = folder / f"sentinel-{port}.conf"
    config.write_text(
        f"port {port}\nbind {host}\nbind-source-addr {host}\ndir {folder}\n"
        f"sentinel monitor {SERVICE} {master.host} {master.port} {_QUORUM}\n"
        f"sentinel down-after-milliseconds {SERVICE} 1000\n"
        f"sentinel failover-timeout {SERVICE} 3000\n"
    )
    command = [find_redis_server(), str(config), "--sentinel"]
    return Server(f"sentinel-{port}", command, folder, processes.environment(), port, host)


def _client(server: Server) -> Redis:
    return Redis(server.host, server.port, decode_responses=True, socket_timeout=2)


def _knows_all(server: Server) -> bool:
    with _client(server) as sentinel:
        state = sentinel.sentinel_master(SERVICE)
    others = _NUM_SENTINELS - 1
    return bool(state["num-slaves"] >= _NUM_REPLICAS and state["num-other-sentinels"] == others)


def _replicas(server: Server) -> bool:
    with _client(server) as client:
        return bool(client.info("replication")["connected_slaves"] == _NUM_REPLICAS)


def _wait(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + _READY_SECONDS
    while True:
        with suppress(RedisError, StopIteration):
            if condition():
                return
        if time.monotonic() > limit:
            raise RuntimeError(f"the Sentinels are not ready after {_READY_SECONDS:g} s")
        time.sleep(_LOOK_SECONDS)
