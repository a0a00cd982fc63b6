"""Tokens of a turn's whole sequence, one by one: text, origin, log-probs, advantage, version."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from seamflow.common.v1 import tokens_pb2

from services.console.sources.run_store import RunStore
from services.console.views.trained_tokens import TrainedTokens

MAX_TOKENS = 4096
"""Tokens of a window."""
_BEFORE = 4


async def token_window(
    store: RunStore, rollout_id: str, turn_id: str, start: int, count: int
) -> dict[str, Any]:
    """Tokens [start, start + count) of the sequence; lists of equal length.

    `trained`, `train_logprob` and `advantage` are None where the trainer has recorded nothing.
    """
    before = min(start, _BEFORE)
    read = await store.window(rollout_id, turn_id, start - before, count + before)
    ids = _ids(read.tokens.token_ids)
    logprobs = list(memoryview(read.tokens.logprobs).cast("f"))
    values: dict[str, list[Any]] = {
        "origin": _by_token(read.tokens.spans, _origin),
        "version": _by_token(read.tokens.spans, _version),
        "server": _by_token(read.tokens.spans, lambda span: span.server_id or None),
    }
    sampled = [origin == "p" for origin in values["origin"]]
    trained = await TrainedTokens.of(store, rollout_id, turn_id)
    places = range(start - before, start - before + len(ids))
    values["logprob"] = [
        number(value) if is_policy else None
        for value, is_policy in zip(logprobs, sampled, strict=True)
    ]
    values["train_logprob"] = [
        None
        if own is None or (difference := trained.difference(place)) is None
        else number(own + difference)
        for own, place in zip(values["logprob"], places, strict=True)
    ]
    values["advantage"] = [trained.advantage(place) for place in places]
    values["trained"] = [int(trained.has(place)) if trained.is_known else None for place in places]
    values["ids"] = ids
    values = {name: each[before:] for name, each in values.items()}
    texts = store.text.texts(ids[before:], ids[:before])
    origin = "".join(values.pop("origin"))
    return {"start": start, "total": read.total, "texts": texts, "origin": origin, **values}


def _ids(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


def _by_token(spans: Sequence[tokens_pb2.Span], value: Any) -> list[Any]:
    return list(_repeated(spans, value))


def _repeated(spans: Sequence[tokens_pb2.Span], value: Any) -> Iterator[Any]:
    for span in spans:
        each = value(span)
        for _ in range(span.num_tokens):
            yield each


def _origin(span: tokens_pb2.Span) -> str:
    return "p" if span.origin == tokens_pb2.ORIGIN_POLICY else "e"


def _version(span: tokens_pb2.Span) -> int | None:
    return span.weight_version if span.origin == tokens_pb2.ORIGIN_POLICY else None


def number(value: float) -> float | None:
    """A number that JSON has, with the digits that float32 has."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
