"""Whether the packages of each process are installed, before the first one is started."""

from __future__ import annotations

from collections.abc import Iterable

from seamflow.installation.extras import how_to_install, missing_packages

from services.chassis.errors import ConfigError
from services.launcher.child_process import ProcessPlan

__all__ = ["check_installed", "extra_of"]

_EMBEDDED = (None, "torch")


def extra_of(table: str, engine: object) -> str:
    """The extra of a process, by the table of its settings; `engine` is that of rollout servers."""
    if table == "rollout_server" and engine not in _EMBEDDED:
        return "sglang"  # without what the embedded engine adds
    return table.replace("_", "-")


def check_installed(plans: Iterable[ProcessPlan], engine: object) -> None:
    """Raise `ConfigError` with a line for each kind of process that lacks packages."""
    tables = dict.fromkeys(plan.table for plan in plans if plan.settings is not None)
    lacking = {
        table: (extra, missing)
        for table in tables
        if (missing := missing_packages(extra := extra_of(table, engine)))
    }
    if lacking:
        raise ConfigError(
            "\n".join(how_to_install(table, missing, e) for table, (e, missing) in lacking.items())
        )
