"""The runs that a console shows: its own, and those whose folders lie beside it."""

from __future__ import annotations

import argparse
import math
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seamflow.inspect.endpoints import SERVICES, Endpoints, UsageError, resolve
from seamflow.inspect.lives import Life, lives, stops
from seamflow.inspect.run_files import json_object
from seamflow.inspect.run_folders import note, started
from seamflow.network.host_port import listens

from services.chassis.rpc import clients
from services.console.api_error import ApiError
from services.console.config import ConsoleConfig
from services.console.sources.step_table import StepTable

_LOOK_SECONDS = 2.0
_CONNECT_SECONDS = 1.0
"""A page that asks why a run waits must not wait long for a service that is away."""
_ARCHIVE = Path(__file__).parents[1] / "demo" / "demo_run.tar.xz"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """One run of the list."""

    run_id: str
    folder: Path | None
    """Its folder, if it is on this machine."""
    endpoints: Endpoints | None
    model: str = ""
    """Folder of the model it started from; empty: unknown."""
    steps: StepTable = field(default_factory=StepTable)

    @property
    def is_live(self) -> bool:
        """Whether its services are up, as far as was known when it was found."""
        return self.endpoints is not None

    @property
    def end(self) -> float:
        """Unix time at which its last life ended; without a record of lives that of its newest
        file; 0: it goes on, or no folder is here."""
        if self.folder is None:
            return 0.0
        for last in self.lives()[-1:]:
            return last.end or 0.0
        names = ("metrics.jsonl", "evaluation.jsonl", "addresses.json")
        files = (self.folder / name for name in names)
        return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)

    def lives(self) -> list[Life]:
        """Of its launcher, oldest first."""
        return [] if self.folder is None else lives(self.folder)

    def stops(self) -> list[tuple[float, float]]:
        """The periods between its lives."""
        return [period for period in stops(self.lives()) if period[1] < math.inf]

    def note(self) -> str:
        """What a person has noted of it."""
        return "" if self.folder is None else note(self.folder)

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
        return {} if self.folder is None else json_object(self.folder / name)


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
        endpoints=replace(found, connect_timeout=_CONNECT_SECONDS) if is_up else None,
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
        connect_timeout=_CONNECT_SECONDS,
    )
    file = folder / "metrics.jsonl" if folder else None
    return replace(run, endpoints=found, steps=StepTable(file))


def _started(folder: Path | None) -> float | None:
    try:
        return None if folder is None else (folder / "addresses.json").stat().st_mtime
    except OSError:
        return None


class ShownRuns:
    """Its own run first; folders are looked at again when they are asked for, not more often."""

    def __init__(self, own: ShownRun, runs_folder: Path | None = None) -> None:
        self._own = own
        self._runs_folder = runs_folder
        self._others: dict[Path, ShownRun] = {}
        self._looked = 0.0

    def all(self) -> list[ShownRun]:
        """The own run, then the others, the newest first."""
        self._look()
        return [self._own, *self._others.values()]

    def get(self, run_id: str) -> ShownRun:
        """The run of a name. Raises `ApiError` for an unknown one."""
        found = next((run for run in self.all() if run.run_id == run_id), None)
        if found is None:
            raise ApiError(404, f"there is no run {run_id[:200]!r} here", "see the list of runs")
        return found

    async def close(self) -> None:
        for run in (self._own, *self._others.values()):
            if run.endpoints is not None:
                await run.endpoints.close()

    def _look(self) -> None:
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._own = _ended(self._own)
        files = list(self._runs_folder.glob("*/addresses.json")) if self._runs_folder else []
        folders = [file.parent for file in files if not file.parent.is_symlink()]
        found: dict[Path, ShownRun] = {}
        for folder in sorted(folders, key=started, reverse=True):
            run = self._run(folder.resolve())
            if run is not None and run.run_id != self._own.run_id:
                found[folder.resolve()] = run
        self._others, self._looked = found, time.monotonic()

    def _run(self, folder: Path) -> ShownRun | None:
        known = self._others.get(folder)
        if known is not None and (known.is_live or not (folder / "run.lock").is_file()):
            return _ended(known)
        try:
            found = folder_run(folder)
        except UsageError:
            return None
        return known if known is not None and not found.is_live else found


def _ended(run: ShownRun) -> ShownRun:
    """The run, read from its folder if its services have ended since it was found."""
    if run.endpoints is None or run.folder is None:
        return run
    if any(life.end is None for life in run.lives()[-1:]):
        return run
    if listens(run.endpoints.services.get("trajectory_manager", "")):
        return run
    return folder_run(run.folder)


@contextmanager
def demo_run() -> Iterator[ShownRun]:
    """The run, unpacked into a temporary folder within the block."""
    with tempfile.TemporaryDirectory(prefix="seamflow-demo-") as folder:
        with tarfile.open(_ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        yield folder_run(next(Path(folder).iterdir()))
