"""How the run of a folder ended, and which command starts its services again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from seamflow.network.host_port import listens

_KNOWN_BY = ("rollout_gateway", "trajectory_manager", "scheduler")


def how_it_ended(folder: Path, addresses: Mapping[str, str]) -> str:
    """One line for people; empty: it goes on, or `seamflow train` has not made the folder."""
    try:
        end = json.loads((folder / "end.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _killed(folder, addresses)
    reason = f" ({end['reason']})" if end.get("reason") else ""
    serve = f"`seamflow serve {_flags(folder, addresses)}`"
    return (
        f"the run in {folder} {end['state']} at {end['time']}{reason}, and its services ended with "
        f"it: {serve} starts them again, with all that they recorded"
    )


def _killed(folder: Path, addresses: Mapping[str, str]) -> str:
    """Of a run that has not written how it ended, and that no service answers for."""
    is_up = any(listens(addresses.get(name, "")) for name in _KNOWN_BY)
    if is_up or not (folder / "logs").is_dir():
        return ""
    flags = _flags(folder, addresses)
    return (
        f"none of the services of the run in {folder} is up, and it has not ended by itself: "
        f"`seamflow train {flags}` continues it, `seamflow serve {flags}` starts its services; "
        f"logs: {folder / 'logs'}"
    )


def _flags(folder: Path, addresses: Mapping[str, str]) -> str:
    """Those that name the run; runs of older releases do not tell their file and folder."""
    name = shlex.quote(addresses.get("run_id", "NAME"))
    flags = f"--config {shlex.quote(addresses.get('config', 'FILE'))} --name {name}"
    here = folder.resolve()
    if addresses.get("folder", str(here)) != str(here):  # it was moved
        flags += f" --runs-folder {shlex.quote(str(here.parent))}"
    return f"{flags} --resume"
