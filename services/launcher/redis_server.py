"""The Redis of a run: a private server, or the user's own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from services.chassis.errors import DependencyUnavailable
from services.chassis.redis.connect import connect, require
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.lib.redis_binary import find_redis_server

_SETTINGS = "redis.conf"
_UMASK = 0o077
"""Its files are for this user alone."""


def given_url(config: LauncherConfig) -> str | None:
    given = config.redis_url
    return given.get_secret_value() if given else os.environ.get("REDIS_URL")


def private_url(folder: Path, port: int) -> str:
    """URL of the private server of the run in `folder`, with its password.

    The password is made at the first start, and stays in a file for this user alone: whoever else
    works on this machine reaches the port, too.
    """
    file = folder / _SETTINGS
    if not file.is_file():
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(f"requirepass {secrets.token_hex(32)}\n")
    password = file.read_text(encoding="utf-8").split()[1]
    return f"redis://:{password}@127.0.0.1:{port}"


def server_plan(config: LauncherConfig, folder: Path, port: int) -> ProcessPlan:
    """A private server whose data lives in the run's folder, with the password of `private_url`."""
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
    # Not an argument: those are for everyone to see.
    settings = [str(folder / _SETTINGS)] if (folder / _SETTINGS).is_file() else []
    return ProcessPlan(name="redis", command=(program, *settings, *arguments), umask=_UMASK)


async def wait_for_store(url: str) -> None:
    """Return once the store answers; raises `DependencyUnavailable` when it does not."""
    client = connect(url)
    try:
        await require(client)
    finally:
        await client.aclose()
