"""When new weights may be published under WAIT: no work in flight may become too old.

The ledger has the versions of finished samples; those of running rollouts are read from their
tokens. The two reads are not atomic: a group missed by both is dropped when it is leased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trajectory_manager.model.tokens import TurnRecord
from trajectory_manager.store.redis.connect import Store

_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishDecision:
    """The answer to AwaitPublish."""

    publish: bool
    num_blocking: int
    """Groups and rollouts that would become too old."""


async def decide(store: Store, run_id: str, epoch: int, weight_version: int) -> PublishDecision:
    """Whether the trainer with `epoch` may publish `weight_version` now.

    Raises:
        ServiceError: STALE_EPOCH.
    """
    waits = await store.ledger.publish_wait(run_id, epoch, weight_version)
    if waits.seconds <= 0:
        return PublishDecision(publish=True, num_blocking=waits.num_blocking_groups)
    oldest = weight_version - (await store.runs.config(run_id)).max_staleness
    blocking = waits.num_blocking_groups
    for start in range(0, len(waits.running), _BATCH):
        batch = waits.running[start : start + _BATCH]
        found = await store.tokens.read(run_id, batch, spans_only=True)
        blocking += sum(_older(turns, oldest) for _, turns in filter(None, found))
    return PublishDecision(publish=blocking == 0, num_blocking=blocking)


def _older(turns: Sequence[TurnRecord], oldest: int) -> bool:
    """Whether a trainable token has a version before `oldest`."""
    return any(
        span.trainable and span.weight_version < oldest
        for record in turns
        for span in record.tokens.spans
    )
