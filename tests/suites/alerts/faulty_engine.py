"""An engine that fails as a file says, and works as the fake one where there is none."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import Chunk, EngineFailed, EngineRequest, WeightsError
from rollout.server.engines.fake import FakeEngine

FAULT_FILE = "ALERTS_FAULT_FILE"
"""Variable of the environment with the file: one of the faults below, or none."""
DIES, NAN, NO_WEIGHTS, LEAKS = "dies", "nan", "no weights", "leaks"
LEAKED_BYTES = 2_300_000_000


class FaultyEngine(FakeEngine):
    """Can be restarted, unlike the fake one; it dies once for each time that it is told to."""

    _leaked = b""

    def __init__(self, config: RolloutServerConfig) -> None:
        super().__init__(config)
        self._info = replace(self._info, features=self._info.features | {"restart"})

    async def prepare_weights(self, folder: Path) -> None:
        """Refuse them under that fault."""
        if _fault() == NO_WEIGHTS:
            raise WeightsError("a damaged file")
        await super().prepare_weights(folder)

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Die, leak, or answer with log-probs that are no numbers."""
        fault = _fault()
        if fault == DIES:
            _file().unlink()
            self.fail("the device is gone")
            raise EngineFailed("the device is gone")
        if fault == LEAKS and not self._leaked:
            self._leaked = b"x" * LEAKED_BYTES
        async for chunk in super().generate(request):
            lost = tuple(math.nan for _ in chunk.logprobs)
            yield replace(chunk, logprobs=lost) if fault == NAN else chunk


def _file() -> Path:
    return Path(os.environ[FAULT_FILE])


def _fault() -> str:
    return _file().read_text() if _file().exists() else ""
