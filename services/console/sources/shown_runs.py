"""The runs that a console shows: its own, and those whose folders lie beside it."""

from __future__ import annotations

import time
from pathlib import Path

from seamflow.inspect.endpoints import UsageError
from seamflow.inspect.run_folders import started
from seamflow.network.host_port import listens

from services.console.api_error import ApiError
from services.console.sources.shown_run import ShownRun, folder_run

_LOOK_SECONDS = 2.0


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
        """Close all connections."""
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
    if not (run.folder / "end.json").is_file():
        return run
    if listens(run.endpoints.services.get("trajectory_manager", "")):
        return run
    return folder_run(run.folder)
