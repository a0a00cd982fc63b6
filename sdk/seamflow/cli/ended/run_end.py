"""How the run of a folder ended, and which command starts its services again."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

__all__ = ["how_it_ended"]

_KNOWN_BY = ("rollout_gateway", "trajectory_manager", "scheduler")
_CONNECT_SECONDS = 0.2


def how_it_ended(folder: Path, addresses: Mapping[str, str]) -> str:
    """One line for people; empty: it goes on, or `seamflow train` has not made the folder."""
    try:
        end = json.loads((folder / "end.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _killed(folder, addresses)
    reason = f" ({end['reason']})" if end.get("reason") else ""
    return (
        f"the run in {folder} {end['state']} at {end['time']}{reason}, and its services ended with "
        f"it: `seamflow serve {_flags(addresses)}` starts them again, with all that they recorded"
    )


def _killed(folder: Path, addresses: Mapping[str, str]) -> str:
    """Of a run that has not written how it ended, and that no service answers for."""
    is_up = any(_listens(addresses.get(name, "")) for name in _KNOWN_BY)
    if is_up or not (folder / "logs").is_dir():
        return ""
    return (
        f"none of the services of the run in {folder} is up, and it has not ended by itself: "
        f"`seamflow train {_flags(addresses)}` continues it, `seamflow serve {_flags(addresses)}` "
        f"starts its services; logs: {folder / 'logs'}"
    )


def _flags(addresses: Mapping[str, str]) -> str:
    """Those that name the run; runs of older releases do not tell their file."""
    name = shlex.quote(addresses.get("run_id", "NAME"))
    return f"--config {shlex.quote(addresses.get('config', 'FILE'))} --name {name} --resume"


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True
