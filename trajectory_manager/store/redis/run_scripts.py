"""The scripts that change or read what lives with one run."""

from __future__ import annotations

from typing import Any

from services.chassis.redis.scripts import Scripts
from trajectory_manager.store.errors import unwrap
from trajectory_manager.store.redis import keys


class RunScripts:
    """A part of the store whose scripts have the keys of one run."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def _call(self, script: str, run_id: str, *args: Any) -> list[Any]:
        reply = await self._scripts.call(script, keys=keys.run_keys(run_id), args=[run_id, *args])
        return unwrap(reply)
