"""What was asked in a rollout and how its last answer ends, for rows of lists."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.errors import SeamflowError
from seamflow.trajectory.v1 import trajectory_pb2

from services.console.sources.run_store import RunStore
from services.console.text import parts_of

_PROMPT_TOKENS = 400
_ANSWER_TOKENS = 100
_CHARACTERS = 300
_READ_AT_ONCE = 16
_KEPT = 10_000
"""Excerpts of ended rollouts that are kept: they never change."""

Values = dict[str, Any]


async def with_excerpts(store: RunStore, rows: Sequence[Values]) -> list[Values]:
    """The rows, each with `prompt` and `answer`: a text, or None where there is none."""
    found = await excerpts(store, [row["rollout_id"] for row in rows])
    return [row | found[row["rollout_id"]] for row in rows]


async def excerpts(store: RunStore, rollout_ids: Iterable[str]) -> dict[str, Values]:
    """`prompt` and `answer` of each rollout; those of a deleted one are None."""
    reading = asyncio.Semaphore(_READ_AT_ONCE)

    async def read(rollout_id: str) -> tuple[str, Values]:
        if rollout_id in store.excerpts:
            return rollout_id, store.excerpts[rollout_id]
        async with reading:
            try:
                return rollout_id, await _excerpt(store, rollout_id)
            except SeamflowError:  # deleted meanwhile
                return rollout_id, {"prompt": None, "answer": None}

    return dict(await asyncio.gather(*map(read, rollout_ids)))


async def _excerpt(store: RunStore, rollout_id: str) -> Values:
    trajectory, task = await store.headers(rollout_id)
    asked = await _prompt(store, trajectory) or (task[:_CHARACTERS] if task else None)
    found = {"prompt": asked, "answer": await _answer(store, trajectory)}
    if trajectory.state != trajectory_pb2.ROLLOUT_STATE_RUNNING:
        store.excerpts[rollout_id] = found
        if len(store.excerpts) > _KEPT:
            del store.excerpts[next(iter(store.excerpts))]
    return found


async def _prompt(store: RunStore, trajectory: trajectory_pb2.Trajectory) -> str | None:
    """The beginning of the user's first message; of the prompt, where no user is known."""
    if not trajectory.turns or not trajectory.turns[0].tokens.spans:
        return None
    name, turn = trajectory.rollout_id, trajectory.turns[0]
    sampled = _sampled(turn)
    count = min(sampled[0] if sampled else _PROMPT_TOKENS, _PROMPT_TOKENS)
    texts = await _texts(store, name, turn.turn_id, 0, count, is_policy=False)
    asked = [text for role, _, text in texts if role == "user"] or [text for *_, text in texts]
    return asked[0][:_CHARACTERS] if asked else None


async def _answer(store: RunStore, trajectory: trajectory_pb2.Trajectory) -> str | None:
    """The end of the newest sampled text, without what was sampled before it."""
    turns = ((turn, _sampled(turn)) for turn in reversed(trajectory.turns))
    turn, (first, end) = next(((turn, of) for turn, of in turns if of), (None, (0, 0)))
    if turn is None:
        return None
    start = max(first, end - _ANSWER_TOKENS)
    place, name = turn.prefix_length + start, trajectory.rollout_id
    texts = await _texts(store, name, turn.turn_id, place, end - start, is_policy=True)
    said = [text for _, kind, text in texts if kind == "text"] or [text for *_, text in texts]
    whole = said[-1] if said else ""
    is_cut = len(whole) > _CHARACTERS or (start > first and len(texts) == 1)
    return f"…{whole[-_CHARACTERS:]}" if is_cut else whole


def _sampled(turn: trajectory_pb2.Turn) -> tuple[int, int] | None:
    """From the first sampled token of the turn's own to after the last one."""
    spans = [span for span in turn.tokens.spans if span.origin == tokens_pb2.ORIGIN_POLICY]
    return (spans[0].start, spans[-1].start + spans[-1].num_tokens) if spans else None


async def _texts(
    store: RunStore, rollout_id: str, turn_id: str, start: int, count: int, *, is_policy: bool
) -> list[tuple[str, str, str]]:
    """Role, kind and text of each part of a turn's tokens [start, start + count)."""
    if not count:
        return []
    read = await store.window(rollout_id, turn_id, start, count)
    ids = memoryview(read.tokens.token_ids).cast("i").tolist()
    parts = parts_of(ids, [is_policy] * len(ids), store.text)
    texts = (store.text.decode(ids[p.start : p.start + p.count]).strip() for p in parts)
    return [(part.role, part.kind, text) for part, text in zip(parts, texts, strict=True)]
