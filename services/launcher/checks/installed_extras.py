"""Whether the packages of each process are installed, before the first one is started."""

from __future__ import annotations

from collections.abc import Iterable

from seamflow.installation.extras import how_to_install, missing_packages

from services.chassis.errors import ConfigError
from services.launcher.child_process import ProcessPlan

_ENGINES = {None: "rollout-server", "torch": "rollout-server", "sglang": "sglang"}
_ANY = "chassis"


def extra_of(table: str, engine: object) -> str:
    """The extra of a process, by the table of its settings; `engine` is that of rollout servers.

    What a plug-in engine needs is not known; it says so itself.
    """
    if table == "rollout_server":
        return _ENGINES.get(engine if isinstance(engine, str) else None, _ANY)
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
