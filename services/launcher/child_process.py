"""A child process of a run: its command, and its settings as environment variables."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.launcher.layout import Layout

__all__ = ["ProcessPlan", "process", "service", "settings_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One child process."""

    name: str
    """Unique in the run; names its log."""
    command: tuple[str, ...]
    """Arguments, the program first."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own environment."""
    restarts: bool = True
    """Restarted when it crashes; a clean exit means it has finished."""
    optional: bool = False
    """The run continues without it when it crashes too often."""
    umask: int = -1
    """Permissions that files of it never have; -1: the launcher's own."""
    check: tuple[str, ...] | None = None
    """Command that checks the configuration without starting anything."""


def service(name: str, module: str, layout: Layout, **settings: object) -> ProcessPlan:
    environment = settings_of(name, port=layout.ports[name], **settings)
    return process(name, module, layout, environment)


def process(name: str, module: str, layout: Layout, environment: Mapping[str, str]) -> ProcessPlan:
    command = (sys.executable, "-m", module, "--config", str(layout.config_file))
    check = (*command, "--check-config")
    return ProcessPlan(name=name, command=command, environment=environment, check=check)


def settings_of(table: str, **settings: object) -> dict[str, str]:
    return {f"SEAMFLOW_{table.upper()}_{name.upper()}": str(v) for name, v in settings.items()}
