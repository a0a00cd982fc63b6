"""Settings of other processes of the run, as far as the launcher has to know them."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from services.launcher.config import LauncherConfig


def process_setting(config: LauncherConfig, config_file: Path, path: str) -> object:
    """What `set`, a variable or the file gives for "table.name" or "table.nested.name".

    Text where `set` or a variable gives it; None if none of them does.
    """
    table, *names = path.split(".")
    for setting in reversed(config.set):
        name, _, value = setting.partition("=")
        if name.strip() == path:
            return value
    variable = f"SEAMFLOW_{table}_{'__'.join(names)}".upper()
    if variable in os.environ:
        return os.environ[variable]
    found: object = tomllib.loads(config_file.read_text(encoding="utf-8-sig"))
    for name in (table, *names):
        found = found.get(name) if isinstance(found, dict) else None
    return found
