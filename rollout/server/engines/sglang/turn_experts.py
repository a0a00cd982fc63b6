"""Routed experts of one turn, as SGLang returns them.

SGLang (0.5.23) returns them with the last message of a request, also of an aborted one:
base64 of int32 [passes, layers, chosen experts], of the passes over the tokens from
`routed_experts_start_len` to the last but one. A request that is aborted in the queue has none.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from rollout.server.engines.engine import EngineFailed
from services.lib.routed_experts import ExpertRecord, RoutingShape


class TurnExperts:
    """What is asked for, and what has come and is not handed out."""

    def __init__(self, first: int | None, routing: RoutingShape | None) -> None:
        """`first`: token to begin with; None: nothing is asked for."""
        self._routing = None if first is None else routing
        self._next = max(first or 0, 1)  # the first token has none
        self._parts: list[ExpertRecord] = []

    def asked(self) -> dict[str, Any]:
        """Fields of the body of the next request."""
        if self._routing is None:
            return {}
        return {"return_routed_experts": True, "routed_experts_start_len": self._next - 1}

    def receive(self, meta: dict[str, Any]) -> None:
        """Take those of a message. Raises `EngineFailed` if they are of another model."""
        encoded = meta.get("routed_experts")
        if self._routing is None or encoded is None:
            return
        ids = np.frombuffer(base64.b64decode(encoded), "<i4")
        if ids.size % (self._routing.num_layers * self._routing.num_chosen):
            raise EngineFailed(
                f"SGLang returned {ids.size} routed experts, the model has "
                f"{self._routing.num_layers} layers with {self._routing.num_chosen} choices"
            )
        known = (ids >= 0) & (ids < self._routing.num_experts)
        experts = np.where(known, ids, self._routing.none).astype(self._routing.dtype)
        experts_tlk = experts.reshape(-1, *self._routing[:2])
        self._parts.append(ExpertRecord(start=self._next, experts_TLK=experts_tlk))
        self._next += len(experts_tlk)

    def taken(self, num_tokens: int) -> ExpertRecord | None:
        """What has come, up to the last of so many tokens of the turn; None: nothing."""
        parts, self._parts = self._parts, []
        if not parts:
            return None
        start = parts[0].start
        experts_tlk = np.concatenate([part.experts_TLK for part in parts])[: num_tokens - start]
        return ExpertRecord(start=start, experts_TLK=experts_tlk) if len(experts_tlk) else None
