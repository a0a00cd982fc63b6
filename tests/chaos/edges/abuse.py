"""Agents that send too much: what an agent beside them notices, and what the gateway keeps."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from seamflow.common.v1.tokens_pb2 import SamplingParams

from bench.harness import processes
from bench.harness.processes import Child
from tests.chaos.edges.canary import compared, memory_growth
from tests.chaos.edges.world import LIMITS_OFF, SETTINGS_OFF, world

_START_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_LIMITS = {"MAX_RENDER_SECONDS": 1}
"""The others are the defaults; a phase must see several renderings end."""
_PROMPT = [{"role": "user", "content": "hello"}]
_SAMPLING = SamplingParams(max_new_tokens=8, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbuseResult:
    """What the other agent noticed."""

    p99_ratio: float
    """99th percentile of its turns' time, beside the abuse to quiet."""
    growth_bytes: int
    """Most memory of the gateway and its processes, less what it had before."""
    codes: Counter[str]
    """How the calls of the abuse ended."""


async def under_abuse(
    folder: Path, abuse: str, seconds: float, *, limits: bool = True
) -> AbuseResult:
    """Alternate quiet and abuse, about `seconds` each; without `limits` for the control."""
    constants, settings = (_LIMITS, {}) if limits else (LIMITS_OFF, SETTINGS_OFF)
    async with world(folder, constants, settings=settings) as made, made.client() as client:
        canary = await client.start_rollout("canary")
        memory = asyncio.create_task(memory_growth(made.gateway))
        numbers = count()

        @asynccontextmanager
        async def disturbance() -> AsyncIterator[None]:
            file = folder / f"codes-{next(numbers)}"
            with _abuser(folder, made.gateway.address, abuse, file):
                await begun(file)
                yield

        turns = await compared(partial(canary.generate, _PROMPT, _SAMPLING), disturbance, seconds)
        memory.cancel()
        growth = await memory
    codes = Counter(
        code for file in folder.glob("codes-*") for code in file.read_text().split()[1:]
    )
    return AbuseResult(p99_ratio=turns.p99_ratio, growth_bytes=growth, codes=codes)


def _abuser(folder: Path, address: str, abuse: str, codes: Path) -> Child:
    command = processes.python("tests.chaos.edges.abuser", address, abuse, str(codes))
    return Child("abuser", command, folder, processes.environment())


async def begun(file: Path) -> None:
    """Return when a disturbance has written the first line of its file."""
    limit = time.monotonic() + _START_SECONDS
    while not (file.exists() and file.stat().st_size) and time.monotonic() < limit:
        await asyncio.sleep(_LOOK_SECONDS)
