"""Names the turn of a call, so that a repeated call gets the turn of the first.

The name is the call's Idempotency-Key. Without one it begins with a digest of route and body: a
call that its SDK marks as a retry continues a recorded turn with that digest.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import web
from seamflow.common.v1 import tokens_pb2

from services.chassis import metrics

if TYPE_CHECKING:
    from seamflow.client.rollout_client import Rollout
    from seamflow.trajectory.v1.trajectory_pb2 import Turn

__all__ = ["TurnIds"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,127}")
_DIGEST_LENGTH = 16
_MATCHED = metrics.counter(
    "http_gateway", "retries_matched_total", "Repeated calls that continued the turn of the first."
)


class TurnIds:
    """The turns that calls of this process work on."""

    def __init__(self) -> None:
        self._live: dict[tuple[str, str], web.Request] = {}

    async def of(self, request: web.Request, body: bytes, rollout: Rollout) -> str:
        """The turn of a call.

        Raises:
            SeamflowError: the rollout's record cannot be read.
        """
        if key := request.headers.get("Idempotency-Key"):
            return key if _NAME.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()
        prefix = _digest(request.path.encode() + b"\0" + body)
        if _is_retry(request):
            turns = (await rollout.trajectory()).turns
            if (found := self._matching(rollout.rollout_id, turns, prefix)) is not None:
                _MATCHED.inc()
                return found
        return f"{prefix}.{uuid.uuid4().hex[:12]}"

    @contextmanager
    def live(self, rollout_id: str, turn_id: str, request: web.Request) -> Iterator[None]:
        """Register the call of this process that works on the turn, within the context."""
        key = rollout_id, turn_id
        self._live[key] = request
        try:
            yield
        finally:
            if self._live.get(key) is request:
                del self._live[key]

    def _matching(self, rollout_id: str, turns: Sequence[Turn], prefix: str) -> str | None:
        """The newest turn with that digest that nobody waits for; one that still runs first."""
        free = [
            turn
            for turn in turns
            if turn.turn_id.startswith(f"{prefix}.")
            and not self._is_waited_for(rollout_id, turn.turn_id)
        ]
        running = [t for t in free if t.finish_reason == tokens_pb2.FINISH_REASON_UNSPECIFIED]
        chosen = running or free
        return chosen[-1].turn_id if chosen else None

    def _is_waited_for(self, rollout_id: str, turn_id: str) -> bool:
        request = self._live.get((rollout_id, turn_id))
        transport = None if request is None else request.transport
        return transport is not None and not transport.is_closing()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_LENGTH]


def _is_retry(request: web.Request) -> bool:
    """Whether the SDK says so; all official ones count their attempts in this header."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
