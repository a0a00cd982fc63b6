"""One publish in the western namespace, until servers on both sides have loaded it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from seamflow.channel import connect

from bench.fleet.receivers import seconds_until_loaded
from bench.harness.processes import Server, environment, python, redis_server, redis_url
from bench.harness.publish_files import publish_files
from bench.harness.redis_process import free_port
from bench.wan.slow_link import ADDRESSES, NAMESPACES

_FILES, _FILE_BYTES = 8, 8 << 20
NUM_BYTES = _FILES * _FILE_BYTES
"""Of a version."""
_RUN = "wan"
_START_SECONDS = 120.0
_KILL_SECONDS = 2.0
"""After the commit, a third of the transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Who stands where."""

    west: int
    """Rollout servers beside the weights service."""
    east: int
    """Rollout servers beyond the link."""
    zones: bool
    """Whether the servers' settings name their zones."""
    kill_leader: bool = False
    """Whether one that passes files on is killed in the middle."""

    @property
    def name(self) -> str:
        """In figures."""
        zones = "zones" if self.zones else "no_zones"
        return f"{self.west}_and_{self.east}_{zones}{'_killed' * self.kill_leader}"


def main() -> None:
    """Start all, say "ready", publish when told, say what it took, end all at end of input."""
    case, folder = Case(**json.loads(sys.argv[1])), Path(sys.argv[2])
    redis = redis_server(folder / "redis", fsync="everysec")
    with redis, ExitStack() as stack:
        own: dict[str, object] = {"redis_url": redis_url(redis), "folder": folder / "weights"}
        weights = _server("services.weights", "weights", 0, folder, own)
        stack.enter_context(weights)
        sides = [0] * case.west + [1] * case.east
        servers = [
            _rollout_server(number, side, case, folder, weights.address)
            for number, side in enumerate(sides)
        ]
        for server in servers:
            server.start()
            stack.callback(_end, server)
        for server in servers:
            _wait(server)
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(asyncio.run(_publish(case, folder, weights.address, servers))), flush=True)
        sys.stdin.read()


def _wait(server: Server) -> None:
    """Until it accepts connections from this side."""
    limit = time.monotonic() + _START_SECONDS
    while time.monotonic() < limit:
        with suppress(OSError), socket.create_connection((server.host, server.port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{server.address} did not start: {server.log.read_text()[-2000:]}")


def _end(server: Server) -> None:
    if server.running:
        server.kill()


def _rollout_server(number: int, side: int, case: Case, folder: Path, weights: str) -> Server:
    own = folder / f"server-{number:02d}"
    own.mkdir()
    settings: dict[str, object] = {
        "engine": "fake",
        "weights": weights,
        "run_id": _RUN,
        "cache_folder": own / "cache",
        "weight_transports": json.dumps(["relay", "shard_stream"]),
    }
    if case.zones:
        settings["zone"] = ("west", "east")[side]
    return _server("rollout.server", "rollout_server", side, own, settings, relays=True)


def _server(
    module: str,
    table: str,
    side: int,
    logs: Path,
    settings: Mapping[str, object],
    *,
    relays: bool = False,
) -> Server:
    """A process that listens in the namespace of a side."""
    port, host = free_port(), ADDRESSES[side]
    given = {"port": port, "host": host, "admin_port": -1, "log_level": "warning", **settings}
    given["development"] = "true"  # plaintext beyond loopback
    if relays:
        given["weight_relay_address"] = f"{host}:{port}"
    names = {f"SEAMFLOW_{table}_{name}".upper(): str(value) for name, value in given.items()}
    inside = ("ip", "netns", "exec", NAMESPACES[side]) if side else ()
    return Server(table, [*inside, *python(module)], logs, environment(names), port, host)


async def _publish(
    case: Case, folder: Path, weights: str, servers: list[Server]
) -> dict[str, float]:
    version = await _committed(folder, weights)
    began = time.monotonic()
    if case.kill_leader:
        await asyncio.sleep(_KILL_SECONDS)
        # By address the first one of its zone: the root of a tree.
        leader = min(servers[case.west :], key=lambda each: each.address)
        leader.kill()
        servers = [each for each in servers if each is not leader]
    await seconds_until_loaded([each.address for each in servers], version)
    return {"seconds": time.monotonic() - began}


async def _committed(folder: Path, weights: str) -> int:
    source = folder / "made"
    source.mkdir()
    files = [source / f"model-{number}.safetensors" for number in range(_FILES)]
    for file in files:
        file.write_bytes(os.urandom(_FILE_BYTES))
    async with connect(weights) as channel:
        return await publish_files(channel, _RUN, 1, files)


if __name__ == "__main__":
    main()
