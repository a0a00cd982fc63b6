"""A private Redis Cluster for tests: real nodes on free ports, killed at will."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from tests.lib.redis_server import RedisServer, free_port

_SLOTS = 16384
_FORM_SECONDS = 30.0


class RedisCluster:
    """Masters that share the slots, and replicas of them, by turns."""

    def __init__(
        self,
        folder: Path,
        masters: int = 3,
        replicas: int = 0,
        settings: dict[str, str] | None = None,
    ) -> None:
        """Prepare `masters` nodes with slots and `replicas` nodes that copy them by turns."""
        common = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": "1000",
            "repl-diskless-sync-delay": "0",
            **(settings or {}),
        }
        self._masters = masters
        self._buses = [free_port() for _ in range(masters + replicas)]
        self.nodes = [
            RedisServer(folder / f"node-{index}", {**common, "cluster-port": str(bus)})
            for index, bus in enumerate(self._buses)
        ]

    @property
    def url(self) -> str:
        """Address for `services.chassis.redis.connect.connect`."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}/"

    def start(self) -> None:
        """Start every node, join them and wait until each says that the cluster is up."""
        for node in self.nodes:
            node.start()
        clients = [Redis(port=node.port, decode_responses=True) for node in self.nodes]
        try:
            self._join(clients)
        finally:
            for client in clients:
                client.close()

    def stop(self) -> None:
        """End every node."""
        for node in self.nodes:
            node.kill()

    def _join(self, clients: Sequence[Redis]) -> None:
        share = -(-_SLOTS // self._masters)
        for index, client in enumerate(clients[: self._masters]):
            last = min(share * (index + 1), _SLOTS) - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", share * index, last)  # type: ignore[no-untyped-call]
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", index + 1)  # type: ignore[no-untyped-call]
        for node, bus in zip(self.nodes[1:], self._buses[1:], strict=True):
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)  # type: ignore[no-untyped-call]
        _wait(lambda: all(_knows(client, len(clients)) for client in clients))
        for index, client in enumerate(clients[self._masters :]):
            master = clients[index % self._masters]
            client.execute_command("CLUSTER REPLICATE", master.cluster("myid"))  # type: ignore[no-untyped-call]
        _wait(lambda: all(_is_up(client) for client in clients))


def _wait(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + _FORM_SECONDS
    while not condition():
        assert time.monotonic() < limit, "the cluster does not form"
        time.sleep(0.02)


def _knows(client: Redis, num_nodes: int) -> bool:
    info: dict[str, str] = client.cluster("info")
    return info["cluster_known_nodes"] == str(num_nodes)


def _is_up(client: Redis) -> bool:
    try:
        replication = client.info("replication")
        linked = replication["role"] == "master" or replication["master_link_status"] == "up"
        info: dict[str, str] = client.cluster("info")
        return bool(linked) and info["cluster_state"] == "ok"
    except RedisError:
        return False
