"""When rollout servers had each weight version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from seamflow.durations import seconds_of
from seamflow.inspect.run_files import json_lines
from seamflow.inspect.snapshot import ServerSnapshot


@dataclass(frozen=True, slots=True)
class Arrival:
    """A server has loaded a version."""

    server: str
    """Its name: that of its node, with a number where the node has several."""
    version: int
    """Of the weights."""
    time: float
    """Unix time, by the server's clock."""


def reported_arrivals(servers: Iterable[ServerSnapshot]) -> list[Arrival]:
    """The newest 64 of each server that answers."""
    return [
        Arrival(server.info.server_id, each.weight_version, seconds_of(each.load_time))
        for server in servers
        if server.info is not None
        for each in server.info.loaded_versions
    ]


def logged_arrivals(folder: Path | None) -> list[Arrival]:
    """All that the logs in a run's folder tell; none without them."""
    files = [] if folder is None else sorted((folder / "logs").glob("rollout_server-*.log"))
    return [arrival for file in files for arrival in _logged(file)]


def _logged(file: Path) -> Iterator[Arrival]:
    for line in json_lines(file):
        if line.get("msg") == "weights_loaded" and isinstance(line.get("weight_version"), int):
            time = datetime.fromisoformat(str(line["ts"])).timestamp()
            yield Arrival(str(line["instance"]), line["weight_version"], time)
