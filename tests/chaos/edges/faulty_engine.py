"""Engines that are broken at once and always, plugged into real rollout servers.

`engine = "tests.chaos.edges.faulty_engine:nan"` and the like: they answer without any work, so they
always have room.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import Chunk, ContextLengthError, EngineRequest, FinishReason
from rollout.server.engines.fake import FakeEngine

FAULTS = ("nan", "positive", "unknown_id", "false_context", "empty", "fails")
_FALSE_CONTEXT = 2


class _Faulty(FakeEngine):
    fault = ""

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """One false answer."""
        if self.fault == "fails":
            raise RuntimeError("this engine is broken")
        if self.fault == "false_context":
            raise ContextLengthError(len(request.token_ids), _FALSE_CONTEXT)
        logprob = {"nan": math.nan, "positive": 1.5}.get(self.fault, -0.5)
        token_id = {"unknown_id": 1 << 30, "empty": 0}.get(self.fault, 1)
        yield Chunk(
            token_ids=(token_id,), logprobs=(logprob,), weight_version=0, finish=FinishReason.STOP
        )


def _build(config: RolloutServerConfig, fault: str) -> FakeEngine:
    engine = FakeEngine(config)
    engine.__class__ = type(f"Faulty_{fault}", (_Faulty,), {"fault": fault})
    return engine


def nan(config: RolloutServerConfig) -> FakeEngine:
    """Log-probs that are no numbers."""
    return _build(config, "nan")


def positive(config: RolloutServerConfig) -> FakeEngine:
    """Log-probs above 0."""
    return _build(config, "positive")


def unknown_id(config: RolloutServerConfig) -> FakeEngine:
    """Ids beyond the vocabulary."""
    return _build(config, "unknown_id")


def false_context(config: RolloutServerConfig) -> FakeEngine:
    """Refuses every prompt as too long."""
    return _build(config, "false_context")


def empty(config: RolloutServerConfig) -> FakeEngine:
    """Ends every answer before it begins."""
    return _build(config, "empty")


def fails(config: RolloutServerConfig) -> FakeEngine:
    """Fails every turn."""
    return _build(config, "fails")
