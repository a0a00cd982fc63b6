"""The Redis of a run: a private server, or the user's own."""

from __future__ import annotations

import os
from pathlib import Path

from services.chassis.errors import DependencyUnavailable
from services.chassis.redis.connect import connect, require
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.lib.redis_binary import find_redis_server

__all__ = ["given_url", "server_plan", "wait_for_store"]


def given_url(config: LauncherConfig) -> str | None:
    """The user's own Redis, if there is one."""
    given = config.redis_url
    return given.get_secret_value() if given else os.environ.get("REDIS_URL")


def server_plan(config: LauncherConfig, folder: Path, port: int) -> ProcessPlan:
    """A private server whose data lives in the run's folder."""
    try:
        program = find_redis_server()
    except FileNotFoundError as error:
        raise DependencyUnavailable("redis", str(error)) from error
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": folder / "redis",
        "appendonly": "yes",
        "appendfsync": "always" if config.durability == "durable" else "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return ProcessPlan(name="redis", command=(program, *arguments))


async def wait_for_store(url: str) -> None:
    """Return once the store answers; raises `DependencyUnavailable` when it does not."""
    client = connect(url)
    try:
        await require(client)
    finally:
        await client.aclose()
