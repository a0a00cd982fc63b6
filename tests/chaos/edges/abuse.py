"""Agents that send too much: what a canary agent beside them notices, and what the gateway keeps.

The canary's turns come one after the other: quiet, then beside the abuse, and so on, and quiet at
the end, as the load of the machine changes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from seamflow.client.rollout_client import Rollout
from seamflow.common.v1.tokens_pb2 import SamplingParams

from bench.harness import processes
from bench.harness.processes import Child, Server
from bench.report import percentile
from tests.chaos.edges.world import LIMITS_OFF, world

__all__ = ["AbuseResult", "under_abuse"]

_SHARE = 0.99
_ROUNDS = 3
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_PROMPT = [{"role": "user", "content": "hello"}]
_SAMPLING = SamplingParams(max_new_tokens=8, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbuseResult:
    """What the canary noticed."""

    quiet: Sequence[float]
    """Seconds of its turns before, between and after."""
    beside: Sequence[float]
    """Seconds of its turns beside the abuse."""
    growth_bytes: int
    """Most memory of the gateway, less what it had before."""
    codes: Counter[str]
    """How the calls of the abuse ended."""

    @property
    def p99_ratio(self) -> float:
        """99th percentile of the turns' time, beside the abuse to quiet."""
        return percentile(self.beside, _SHARE) / percentile(self.quiet, _SHARE)


async def under_abuse(
    folder: Path, abuse: str, seconds: float, *, limits: bool = True
) -> AbuseResult:
    """Alternate quiet and abuse, about `seconds` each; without `limits` for the control."""
    settings: dict[str, int] = {} if limits else LIMITS_OFF
    async with world(folder, settings) as made, made.client() as client:
        canary = await client.start_rollout("canary")
        await _turns(canary, seconds / 2)  # warm
        quiet, beside, codes = await _turns(canary, seconds), [], Counter[str]()
        before = _memory(made.gateway)
        memory = asyncio.create_task(_most_memory(made.gateway))
        for number in range(_ROUNDS):
            file = folder / f"codes-{number}"
            file.touch()
            with _abuser(folder, made.gateway.address, abuse, file):
                await _begun(file)
                beside += await _turns(canary, seconds)
            await asyncio.sleep(1.0)
            quiet += await _turns(canary, seconds)
            codes.update(file.read_text().split()[1:])
        memory.cancel()
    growth = await memory - before
    return AbuseResult(quiet=quiet, beside=beside, growth_bytes=growth, codes=codes)


def _abuser(folder: Path, address: str, abuse: str, codes: Path) -> Child:
    command = processes.python("tests.chaos.edges.abuser", address, abuse, str(codes))
    return Child("abuser", command, folder, processes.environment())


async def _begun(codes: Path) -> None:
    """Return when the abuse has begun."""
    limit = time.monotonic() + _START_SECONDS
    while not codes.stat().st_size and time.monotonic() < limit:
        await asyncio.sleep(_LOOK_SECONDS)


async def _turns(canary: Rollout, seconds: float) -> list[float]:
    """Seconds of each turn that begins within `seconds`."""
    limit, found = time.monotonic() + seconds, []
    while (began := time.monotonic()) < limit:
        await canary.generate(_PROMPT, _SAMPLING)
        found.append(time.monotonic() - began)
    return found


def _memory(server: Server) -> int:
    rss: int = psutil.Process(server.pid).memory_info().rss
    return rss


async def _most_memory(server: Server) -> int:
    most = 0
    try:
        while True:
            most = max(most, _memory(server))
            await asyncio.sleep(_LOOK_SECONDS)
    except asyncio.CancelledError:
        return most
