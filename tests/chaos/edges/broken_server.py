"""One broken rollout server of three: how many groups it costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from seamflow.client import Client
from seamflow.common.v1.tokens_pb2 import SamplingParams
from seamflow.errors import SeamflowError

from tests.chaos.edges.world import EJECTION_OFF, world

_GROUP_SIZE = 4
_TURNS = 3
_ROLLOUTS_AT_ONCE = 16
_STEP_SECONDS = 0.01


async def share_of_groups_lost(
    folder: Path, fault: str, num_groups: int, seed: int, *, ejection: bool = True
) -> float:
    """The share of groups of which a rollout failed, or got an answer of the broken server.

    `ejection`: off, the broken server stays in use.
    """
    engines = ("fake", "fake", fault)
    limits: dict[str, int] = {} if ejection else EJECTION_OFF
    async with (
        world(folder, limits, engines, _STEP_SECONDS) as made,
        made.client() as client,
    ):
        at_once, random = asyncio.Semaphore(_ROLLOUTS_AT_ONCE), Random(seed)
        prompts = [[random.randrange(1, 250) for _ in range(8)] for _ in range(num_groups)]
        lost = await asyncio.gather(
            *(_is_lost(client, f"group-{i}", prompt, at_once) for i, prompt in enumerate(prompts))
        )
    return sum(lost) / num_groups


async def _is_lost(
    client: Client, name: str, prompt: list[int], at_once: asyncio.Semaphore
) -> bool:
    ended = await asyncio.gather(
        *(_has_failed(client, f"{name}-{i}", prompt, at_once) for i in range(_GROUP_SIZE))
    )
    return any(ended)


async def _has_failed(
    client: Client, rollout_id: str, prompt: list[int], at_once: asyncio.Semaphore
) -> bool:
    async with at_once:
        rollout = await client.start_rollout(rollout_id)
        try:
            for _ in range(_TURNS):
                turn = await rollout.generate(
                    token_ids=prompt, sampling=SamplingParams(max_new_tokens=16, ignore_eos=True)
                )
                if any(span.server_id == "server-2" for span in turn.spans):
                    return True
        except SeamflowError:
            return True
        return False
