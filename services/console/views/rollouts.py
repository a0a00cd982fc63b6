"""The list of rollouts: filters, pages, and a search of their text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.errors import NotFoundError
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.console.api_error import ApiError
from services.console.sources.run_store import RunStore
from services.console.views.excerpts import with_excerpts
from services.console.views.rows import rollout_row

_ENUMS: Mapping[str, tuple[Any, str]] = {
    "purpose": (tokens_pb2.Purpose, "purpose"),
    "state": (trajectory_pb2.RolloutState, "state"),
    "failure": (tokens_pb2.FailureClass, "failure_class"),
}
_NUMBERS: Mapping[str, tuple[type[int] | type[float], str]] = {
    "step": (int, "step"),
    "reward_min": (float, "min_reward"),
    "reward_max": (float, "max_reward"),
    "tokens_min": (int, "min_tokens"),
    "tokens_max": (int, "max_tokens"),
    "turns_min": (int, "min_turns"),
    "turns_max": (int, "max_turns"),
}
Summary = trajectory_pb2.RolloutSummary
_READ_AT_ONCE = 8
_TEXTS_PER_CALL = 200
"""Rollouts whose text one call reads: the page shows how far it is, and calls again."""
_MAX_TEXT_TOKENS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutList:
    """What is asked for."""

    search: pb.SearchRolloutsRequest
    text: str = ""
    """Only rollouts with this text, in any case; empty: all."""
    limit: int = 50
    """Rows of a page."""
    cursor: str = ""


def search_of(query: Mapping[str, str]) -> RolloutList:
    """The list that a query asks for.

    Raises:
        ApiError: names the part of the query that is wrong, and what it may be.
    """
    search = pb.SearchRolloutsRequest(group_id=query.get("group", ""))
    for name, (kind, target) in _ENUMS.items():
        if text := query.get(name):
            setattr(search, target, _enum(kind, name, text))
    for name, (number, target) in _NUMBERS.items():
        if text := query.get(name):
            setattr(search, target, _number(number, name, text))
    limit = min(max(int(_number(int, "limit", query.get("limit") or "50")), 1), 500)
    return RolloutList(
        search=search,
        text=query.get("text", "").casefold(),
        limit=limit,
        cursor=query.get("cursor", ""),
    )


def _enum(kind: Any, name: str, text: str) -> int:
    prefix = kind.Name(0).removesuffix("UNSPECIFIED")
    known = [each.removeprefix(prefix).lower() for each in kind.keys()][1:]  # noqa: SIM118
    if text.lower() not in known:
        raise ApiError(400, f"{name} is {text[:50]!r}", f"use one of {', '.join(known)}")
    return int(kind.Value(prefix + text.upper()))


def _number(kind: type[int] | type[float], name: str, text: str) -> float:
    try:
        return kind(text)
    except ValueError as error:
        raise ApiError(400, f"{name} is {text[:50]!r}, no number", "correct the filter") from error


async def rollouts(store: RunStore, asked: RolloutList) -> dict[str, Any]:
    """One page: rows, the cursor of the next one, how many were looked at, how many there are."""
    page = _Page(store, asked)
    await page.read()
    return {
        "rows": page.rows,
        "next": page.next or None,
        "searched": page.num_searched,
        "total": page.num_started,
        "note": page.note(),
    }


@dataclass(slots=True)
class _Page:
    _store: RunStore
    _asked: RolloutList
    rows: list[dict[str, Any]] = field(default_factory=list)
    next: str = ""
    num_searched: int = 0
    num_started: int = 0
    num_unindexed: int = 0

    async def read(self) -> None:
        """Newest first."""
        before, _, token = self._asked.cursor.partition(":")
        self.num_searched = int(before) if before.isdecimal() else 0
        most = _TEXTS_PER_CALL if self._asked.text else self._asked.limit
        found = await self._find(token, min(self._asked.limit, most))
        self.next = f"{self.num_searched}:{found.next_page_token}" if found.next_page_token else ""
        wanted = await self._with_text(found.rollouts)
        trained = await self._trained(wanted)
        rows = [rollout_row(each, trained.get(each.rollout_id)) for each in wanted]
        self.rows = await with_excerpts(self._store, rows)

    async def _trained(self, found: Sequence[Summary]) -> dict[str, trajectory_pb2.TrainedSample]:
        """How they were trained, as far as it is recorded."""
        names: dict[int, list[str]] = {}
        for each in found:
            if each.step:
                names.setdefault(each.step, []).append(each.rollout_id)
        samples = (self._store.trained(step, tuple(of)) for step, of in names.items())
        return {s.rollout_id: s for listed in samples async for s in listed}

    def note(self) -> str | None:
        """What the list leaves out."""
        if not self.num_unindexed:
            return None
        return (
            f"The oldest {self.num_unindexed:,} of {self.num_started:,} rollouts are not listed: "
            "max_indexed_rollouts of [trajectory_manager] are newer. Steps, groups and names still "
            "find them."
        )

    async def _find(self, token: str, size: int) -> pb.SearchRolloutsResponse:
        search = pb.SearchRolloutsRequest(page_size=size, page_token=token)
        search.MergeFrom(self._asked.search)
        found = await self._store.found(search)
        self.num_searched += found.num_searched
        self.num_started, self.num_unindexed = found.num_started, found.num_unindexed
        return found

    async def _with_text(self, found: Sequence[Summary]) -> Sequence[Summary]:
        if not self._asked.text:
            return found
        reading = asyncio.Semaphore(_READ_AT_ONCE)

        async def has_text(summary: Summary) -> bool:
            async with reading:
                text = [part async for part in _texts(self._store, summary)]
            return self._asked.text in "".join(text).casefold()

        has = await asyncio.gather(*(has_text(each) for each in found))
        return [each for each, is_wanted in zip(found, has, strict=True) if is_wanted]


async def _texts(store: RunStore, summary: Summary) -> AsyncIterator[str]:
    """What each turn added, as text; of a turn its first 65,536 tokens."""
    try:
        trajectory, _ = await store.headers(summary.rollout_id)
        for turn in trajectory.turns:
            read = await store.window(
                summary.rollout_id, turn.turn_id, turn.prefix_length, _MAX_TEXT_TOKENS
            )
            ids = memoryview(read.tokens.token_ids).cast("i").tolist()
            yield store.text.decode(ids)
    except NotFoundError:
        return  # deleted meanwhile
