"""A run that is shown: its services if they are up, its folder if it is here."""

from __future__ import annotations

import argparse
import json
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seamflow.inspect.endpoints import SERVICES, Endpoints, resolve
from seamflow.network.host_port import listens

from services.chassis.rpc import clients
from services.console.config import ConsoleConfig
from services.console.sources.kept_endpoints import KeptEndpoints, kept
from services.console.sources.step_table import StepTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """One run of the list."""

    run_id: str
    """Its name, by which it is requested."""
    folder: Path | None
    """Its folder, if it is on this machine."""
    endpoints: KeptEndpoints | None
    """Its services; None: they have ended."""
    model: str = ""
    """Folder of the model it started from; empty: unknown."""
    steps: StepTable = field(default_factory=StepTable)
    """Metrics of its steps."""

    @property
    def is_live(self) -> bool:
        """Whether its services are up, as far as was known when it was found."""
        return self.endpoints is not None

    @property
    def end(self) -> float:
        """Unix time at which it ended, by the newest of its files; 0: no folder is here."""
        if self.folder is None:
            return 0.0
        names = ("end.json", "metrics.jsonl", "evaluation.jsonl", "addresses.json")
        files = (self.folder / name for name in names)
        return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)

    def algorithm(self) -> str:
        """Its name in the run's configuration file; empty: not there, or the file has gone."""
        file = self.json("addresses.json").get("config", "")
        try:
            tables = tomllib.loads(Path(file).read_text(encoding="utf-8-sig")) if file else {}
        except (OSError, ValueError):
            return ""
        trainer = tables.get("trainer", {})
        return str(trainer.get("algorithm", {}).get("name", ""))

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object of its folder; {}: there is no such file, or it is in writing."""
        if self.folder is None:
            return {}
        try:
            values = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}


def folder_run(folder: Path) -> ShownRun:
    """The run of a folder, live if its trajectory manager listens.

    Raises:
        UsageError: no run is there.
    """
    flags = dict.fromkeys((*SERVICES, "run", "tls_ca_file", "tls_cert_file", "tls_key_file"))
    given = argparse.Namespace(run_folder=folder, **flags)
    found = resolve(given, {})
    is_up = not found.ended and listens(found.services["trajectory_manager"])
    return ShownRun(
        run_id=found.run_id or folder.resolve().name,
        folder=folder.resolve(),
        endpoints=kept(found) if is_up else None,
        model=found.model or "",
        steps=StepTable(folder / "metrics.jsonl"),
    )


def live_run(config: ConsoleConfig) -> ShownRun:
    """The run whose addresses the settings name."""
    names = {"gateway": config.rollout_gateway}
    given = {name: names.get(name) or str(getattr(config, name, "")) for name in SERVICES}
    folder = config.run_folder.resolve() if config.run_folder else None
    run = ShownRun(run_id=config.run_id, folder=folder, endpoints=None, model=config.model)
    found = Endpoints(
        run_id=config.run_id or None,
        services={name: address for name, address in given.items() if address},
        folder=folder,
        model=config.model or None,
        agents=str(run.json("addresses.json").get("agents", "")),
        zones=run.json("addresses.json").get("zones", {}),
        started=_started(folder),
        credentials=clients.credentials(config),
    )
    file = folder / "metrics.jsonl" if folder else None
    return replace(run, endpoints=kept(found), steps=StepTable(file))


def _started(folder: Path | None) -> float | None:
    try:
        return None if folder is None else (folder / "addresses.json").stat().st_mtime
    except OSError:
        return None
