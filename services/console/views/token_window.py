"""Tokens of a turn's whole sequence, one by one: text, origin, log-probs, advantage, version."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.console.sources.run_store import RunStore

MAX_TOKENS = 4096
_BEFORE = 4

_Values = tuple[float | None, float | None]


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


class TrainedTokens:
    """Advantage and train − rollout log-prob by place in a turn's whole sequence."""

    def __init__(self, by_place: Mapping[int, _Values], *, is_known: bool = True) -> None:
        self._by_place = by_place
        self.is_known = is_known
        """Whether what was trained is recorded; of older steps it is not."""

    @classmethod
    async def of(cls, store: RunStore, rollout_id: str, turn_id: str) -> Self:
        """Of the step that trained the rollout; empty where none did, or nothing is recorded."""
        found = await store.found(pb.SearchRolloutsRequest(rollout_ids=[rollout_id]))
        step = found.rollouts[0].step if found.rollouts else 0
        if not step:
            return cls({})
        samples = store.trained(step, (rollout_id,), with_tokens=True)
        listed = [sample async for sample in samples]
        turns = (await store.headers(rollout_id))[0].turns if listed else []
        return cls(trained_places(turns, listed, turn_id), is_known=bool(listed))

    def has(self, place: int) -> bool:
        return place in self._by_place

    def difference(self, place: int) -> float | None:
        """Log-prob in the trainer minus that recorded at sampling."""
        return self._by_place.get(place, (None, None))[0]

    def advantage(self, place: int) -> float | None:
        return self._by_place.get(place, (None, None))[1]


def trained_places(
    turns: Sequence[trajectory_pb2.Turn],
    samples: Sequence[trajectory_pb2.TrainedSample],
    turn_id: str,
) -> dict[int, _Values]:
    """Difference and advantage by place in the turn's sequence, as far as samples share it."""
    own = _path(turns, turn_id)
    found: dict[int, _Values] = {}
    for sample in samples:
        common = _common(own, _path(turns, sample.sample_id.partition("#")[2]))
        found |= {place: each for place, each in _values(sample) if place < common}
    return found


def _path(turns: Sequence[trajectory_pb2.Turn], turn_id: str) -> list[tuple[str, int]]:
    """Turns of a turn's whole sequence from the root on, each with the end of its tokens in it."""
    by_id = {turn.turn_id: turn for turn in turns}
    path, end = list[tuple[str, int]](), -1
    turn = by_id.get(turn_id)
    while turn is not None:
        own = turn.prefix_length + sum(span.num_tokens for span in turn.tokens.spans)
        path.append((turn.turn_id, own if end < 0 else min(own, end)))
        end = turn.prefix_length
        turn = by_id.get(turn.prefix_turn_id)
    return path[::-1]


def _common(one: Sequence[tuple[str, int]], other: Sequence[tuple[str, int]]) -> int:
    """Number of first places that two sequences share."""
    shared = 0
    for (turn, end), (other_turn, other_end) in zip(one, other, strict=False):
        if turn != other_turn:
            break
        shared = min(end, other_end)
        if end != other_end:
            break
    return shared


def _values(sample: trajectory_pb2.TrainedSample) -> list[tuple[int, _Values]]:
    places = [
        place for span in sample.spans for place in range(span.start, span.start + span.num_tokens)
    ]
    differences = _float16(sample.logprob_differences, len(places))
    advantages = _float16(sample.advantages, len(places))
    return list(zip(places, zip(differences, advantages, strict=True), strict=True))


def _float16(packed: bytes, count: int) -> Sequence[float | None]:
    """One for each token; of a single value that one for all, of none None."""
    values = struct.unpack(f"<{len(packed) // 2}e", packed)
    if len(values) == 1:
        return values * count
    return values if len(values) == count else [None] * count
