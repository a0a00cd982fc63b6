"""A child process of a run: its command, and its settings as environment variables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.chassis.errors import ExitCode
from services.launcher.layout import Layout
from services.launcher.node_plan import NodePlan
from services.lib.gpus import seeing_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One child process."""

    name: str
    """Unique in the run; names its log."""
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own environment."""
    restarts: bool = True
    """Restarted when it crashes; a clean exit means it has finished."""
    fatal: tuple[int, ...] = (ExitCode.USAGE, ExitCode.CONFIG)
    """Exit codes after which it is not restarted, as the same start would fail the same way."""
    optional: bool = False
    """The run continues without it when it crashes too often."""
    umask: int = -1
    """Permissions that files of it never have; -1: the launcher's own."""
    settings: tuple[str, ...] | None = None
    """Arguments among its command that name its settings; None: it has no table of them."""
    check: tuple[str, ...] | None = None
    """Command that loads the user's code that the process will run, and ends."""
    host: int = 0
    """Place of the host that starts it in the list of the run's hosts."""
    address: str = ""
    """host:port at which it says what it waits for; empty: it does not."""

    @property
    def table(self) -> str:
        """Of its settings: processes of one kind are numbered, or named after their node."""
        return self.name.partition("-")[0]


def service(name: str, module: str, layout: Layout, **settings: object) -> ProcessPlan:
    environment = settings_of(name, port=layout.ports[name], **settings)
    return process(name, module, layout, environment)


def process(name: str, module: str, layout: Layout, environment: Mapping[str, str]) -> ProcessPlan:
    settings = ("--config", str(layout.config_file))
    command = (sys.executable, "-m", module, *settings)
    return ProcessPlan(name=name, command=command, environment=environment, settings=settings)


def checking(module: str, layout: Layout) -> tuple[str, ...]:
    """Command of a module that checks the settings and the user's files of a process."""
    return (sys.executable, "-m", module, "--config", str(layout.config_file))


def settings_of(table: str, **settings: object) -> dict[str, str]:
    return {f"SEAMFLOW_{table.upper()}_{name.upper()}": str(v) for name, v in settings.items()}


def with_gpus(plan: ProcessPlan, gpus: Sequence[int], nodes: Sequence[NodePlan]) -> ProcessPlan:
    """The process with just these GPUs, which may be none; unchanged if no node has any."""
    if not any(node.gpus for node in nodes):
        return plan
    return replace(plan, environment={**plan.environment, **seeing_gpus(gpus)})
