"""Names the turn of a call, so that a repeated call gets the turn of the first.

The name is the call's Idempotency-Key. Without one it begins with a digest of route and body: a
call that its SDK marks as a retry continues a recorded turn with that digest.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from services.chassis import metrics

if TYPE_CHECKING:
    from seamflow.client.rollout_client import Rollout
    from seamflow.trajectory.v1.trajectory_pb2 import Turn

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,127}")
_DIGEST_LENGTH = 16
_MAX_UNANSWERED = 1 << 16
"""Turns that are remembered although their clients do not ask again."""
_MATCHED = metrics.counter(
    "http_gateway", "retries_matched_total", "Repeated calls that continued the turn of the first."
)


class TurnIds:
    """Names the turns of the calls of this process."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex[:8]  # tells the turns of this process from others
        # Turns whose answer has not arrived, oldest first, and the call that waits for it.
        self._unanswered: dict[tuple[str, str], web.Request | None] = {}

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
            if (found := self._matching(rollout.rollout_id, turns, f"{prefix}.")) is not None:
                _MATCHED.inc()
                return found
        return f"{prefix}.{self._life}{uuid.uuid4().hex[:12]}"

    @contextmanager
    def call(
        self, rollout_id: str, turn_id: str, request: web.Request, has_ended: Callable[[], bool]
    ) -> Iterator[None]:
        """Register the call that waits for the turn, within the context.

        Its answer has arrived if the context ends without an error after the turn has ended.
        """
        key = rollout_id, turn_id
        self._unanswered.pop(key, None)
        self._unanswered[key] = request
        has_arrived = False
        try:
            yield
            has_arrived = has_ended() and _is_connected(request)
        finally:
            if self._unanswered.get(key) is request:
                self._unanswered[key] = None
                if has_arrived:
                    del self._unanswered[key]
                elif len(self._unanswered) > _MAX_UNANSWERED:
                    del self._unanswered[next(iter(self._unanswered))]

    def _matching(self, rollout_id: str, turns: Sequence[Turn], prefix: str) -> str | None:
        """The newest turn whose answer has not arrived; one that still runs first."""
        equal = [turn for turn in turns if turn.turn_id.startswith(prefix)]
        continued = {turn.prefix_turn_id for turn in turns}
        is_only = len(equal) == 1 and equal[0].turn_id not in continued
        free = [turn for turn in equal if self._is_free(rollout_id, turn, prefix, is_only=is_only)]
        running = [turn for turn in free if not turn.finish_reason]
        chosen = running or free
        return chosen[-1].turn_id if chosen else None

    def _is_free(self, rollout_id: str, turn: Turn, prefix: str, *, is_only: bool) -> bool:
        """Whether the turn's answer may have reached nobody, and no call waits for it."""
        key = rollout_id, turn.turn_id
        if key in self._unanswered:
            return not _is_connected(self._unanswered[key])
        is_own = turn.turn_id.startswith(prefix + self._life)
        return not is_own and (is_only or not turn.finish_reason)


def _is_connected(request: web.Request | None) -> bool:
    transport = None if request is None else request.transport
    return transport is not None and not transport.is_closing()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_LENGTH]


def _is_retry(request: web.Request) -> bool:
    """Whether the SDK says so; all official ones count their attempts in this header."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
