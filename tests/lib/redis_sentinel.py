"""A master, two replicas and three Sentinels for tests: real processes, killed or frozen."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from services.lib.redis_binary import find_redis_server
from tests.lib.redis_server import RedisServer, free_port

SERVICE = "seamflow"
_READY_SECONDS = 30.0


class RedisSentinel:
    """`servers[0]` is the first master; Sentinels agree by two and wait half a second."""

    def __init__(
        self, folder: Path, settings: dict[str, str] | None = None, num_sentinels: int = 3
    ) -> None:
        """Prepare the servers with more `settings`, such as min-replicas-to-write."""
        common = {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
        self.servers = [
            RedisServer(folder / f"server-{index}", {**common, **(settings or {})})
            for index in range(3)
        ]
        for replica in self.servers[1:]:
            replica.settings["replicaof"] = f"127.0.0.1 {self.servers[0].port}"
        self._folder = folder
        self._ports = [free_port() for _ in range(num_sentinels)]
        self._sentinels: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """Address for `services.chassis.redis.connect.connect`."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def start(self) -> None:
        """Start everything and wait until the replicas follow and the Sentinels know them."""
        for server in self.servers:
            server.start()
        with _client(self.servers[0].port) as master:
            _wait(lambda: master.info("replication")["connected_slaves"] == 2)
        self.start_sentinels()

    def start_sentinels(self) -> None:
        """Start the Sentinels, with what they knew when they were killed."""
        self._sentinels = [self._start_sentinel(port) for port in self._ports]
        for port in self._ports:
            with _client(port) as sentinel:
                _wait(partial(self._is_complete, sentinel))

    def stop(self) -> None:
        """End everything."""
        self.kill_sentinels()
        for server in self.servers:
            server.kill()

    def master(self) -> RedisServer:
        """The server that a majority of the Sentinels calls the master."""
        for server in self.servers:
            votes = 0
            for port in self._ports:
                with _client(port) as sentinel:
                    address = sentinel.sentinel_get_master_addr_by_name(SERVICE)
                    assert isinstance(address, tuple)
                    votes += address[1] == server.port
            if votes > len(self._ports) // 2:
                return server
        raise RuntimeError("the Sentinels do not agree on a master")

    def cut_replicas(self) -> list[RedisServer]:
        """Freeze the replicas and close their links: what is written now reaches nobody."""
        master = self.master()
        replicas = [server for server in self.servers if server.runs and server is not master]
        for replica in replicas:
            replica.freeze()
        with _client(master.port) as client:
            client.client_kill_filter(_type="replica")
        return replicas

    def wait_for_master_other_than(self, old: RedisServer) -> RedisServer:
        """The first one that a majority agrees on and that is not `old`."""
        _wait(lambda: self.master() is not old)
        return self.master()

    def kill_sentinels(self) -> None:
        """End every Sentinel as a crash would."""
        for sentinel in self._sentinels:
            sentinel.kill()
            sentinel.wait()
        self._sentinels = []

    def _start_sentinel(self, port: int) -> subprocess.Popen[bytes]:
        # A Sentinel rewrites its configuration, so each has a file of its own.
        config = self._folder / f"sentinel-{port}.conf"
        if not config.exists():
            config.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {self._folder}\n"
                f"sentinel monitor {SERVICE} 127.0.0.1 {self.servers[0].port} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} 500\n"
                f"sentinel failover-timeout {SERVICE} 3000\n"
            )
        with (self._folder / f"sentinel-{port}.log").open("ab") as log:
            command = [find_redis_server(), str(config), "--sentinel"]
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _is_complete(self, sentinel: Redis) -> bool:
        state = sentinel.sentinel_master(SERVICE)
        assert isinstance(state, dict)
        others = len(self._ports) - 1
        return bool(state["num-slaves"] == 2 and state["num-other-sentinels"] == others)


@contextmanager
def _client(port: int) -> Iterator[Redis]:
    client = Redis(port=port, decode_responses=True)
    try:
        yield client
    finally:
        client.close()


def _wait(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + _READY_SECONDS
    while not _holds(condition):
        assert time.monotonic() < limit, "the Sentinels do not become ready"
        time.sleep(0.02)


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except RedisError:
        return False
