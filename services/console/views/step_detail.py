"""One optimizer step: its groups with their samples, and groups discarded meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.durations import seconds_of
from seamflow.enum_names import enum_name
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.console.sources.run_store import RunStore
from services.console.sources.step_table import StepTable
from services.console.views.excerpts import excerpts
from services.console.views.rows import rollout_row
from services.lib.group_baseline import are_equal

_SECONDS = 20.0
_MAX_GROUPS = 256
"""Groups whose prompts are read."""
_MAX_LISTED = 5000
"""Rollouts, newest first, among which those that ended during the step are looked for."""
_MAX_LETTERS = 1000

Values = dict[str, Any]
Summary = trajectory_pb2.RolloutSummary


async def step_detail(store: RunStore, table: StepTable, step: int) -> Values:
    """Metrics, groups, discarded groups, and lengths of what was trained and what was generated.

    `lengths.generated` has all rollouts that ended while the step was prepared, so that both show
    whether long ones are lost; None where that is too long ago to be looked up.
    """
    times = _times(table, step)
    summaries, samples, discarded, ended = await asyncio.gather(
        _summaries(store, step),
        _samples(store, step),
        _discarded(store, times),
        _ended(store, times),
    )
    trained = await _groups(store, summaries, samples)
    lost = await _discarded_groups(store, discarded)
    rows = [row for group in trained for row in group["samples"]]
    generated = None if ended is None else [each.num_policy_tokens for each in ended]
    return {
        "step": step,
        "metrics": table.row(step),
        "groups": [*trained, *lost],
        "lengths": {"trained": [r["policy_tokens"] for r in rows], "generated": generated},
        "rewards": [row["reward"] for row in rows if row["reward"] is not None],
        "recorded": bool(samples),
    }


def _times(table: StepTable, step: int) -> tuple[float, float] | None:
    """When the step before ended, and this one; None: unknown."""
    end, begin = table.row(step).get("time"), table.row(step - 1).get("time")
    return None if end is None else (0.0 if begin is None else begin, end)


async def _summaries(store: RunStore, step: int) -> list[Summary]:
    search = pb.SearchRolloutsRequest(step=step, page_size=1000)
    found = list[Summary]()
    while True:
        page = await store.found(search)
        found += page.rollouts
        if not page.next_page_token:
            return found
        search.page_token = page.next_page_token


async def _samples(store: RunStore, step: int) -> list[trajectory_pb2.TrainedSample]:
    return [sample async for sample in store.trained(step)]


async def _ended(store: RunStore, times: tuple[float, float] | None) -> list[Summary] | None:
    """TRAIN rollouts that finished within the times."""
    if times is None:
        return None
    search = pb.SearchRolloutsRequest(purpose=tokens_pb2.PURPOSE_TRAIN, page_size=1000)
    found, num_listed = list[Summary](), 0
    while num_listed < _MAX_LISTED:
        page = await store.found(search)
        num_listed += page.num_searched
        ends = ((each, seconds_of(each.finish_time)) for each in page.rollouts)
        found += [each for each, end in ends if times[0] < end <= times[1]]
        begun = min((seconds_of(each.create_time) for each in page.rollouts), default=math.inf)
        if not page.next_page_token or begun < times[0] - (times[1] - times[0]):
            return found
        search.page_token = page.next_page_token
    return None


async def _discarded(
    store: RunStore, times: tuple[float, float] | None
) -> list[task_pb.DeadLetter]:
    if times is None:
        return []
    request = task_pb.ListDeadLettersRequest(
        run_id=store.run_id, page_size=_MAX_LETTERS, newest_first=True
    )
    page = await store.tasks.ListDeadLetters(request, timeout=_SECONDS)
    return [e for e in page.dead_letters if times[0] < seconds_of(e.discard_time) <= times[1]]


async def _groups(
    store: RunStore,
    summaries: Sequence[Summary],
    samples: Sequence[trajectory_pb2.TrainedSample],
) -> list[Values]:
    by_rollout = {sample.rollout_id: sample for sample in samples}
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary.group_id, []).append(summary)
    firsts = [members[0].rollout_id for members in groups.values()]
    asked = await excerpts(store, firsts[:_MAX_GROUPS])
    return [
        _group(
            name,
            "trained",
            None,
            asked.get(members[0].rollout_id, {}).get("prompt") or "",
            [rollout_row(each, by_rollout.get(each.rollout_id)) for each in members],
        )
        for name, members in groups.items()
    ]


async def _discarded_groups(store: RunStore, letters: Sequence[task_pb.DeadLetter]) -> list[Values]:
    names = [name for letter in letters for name in letter.rollout_ids]
    rows = {row["rollout_id"]: row for row in await _rows(store, names)}
    return [
        _group(
            letter.task.task_id,
            "discarded",
            _cause(letter),
            letter.task.payload_json[:500],
            [rows[name] for name in letter.rollout_ids if name in rows],
        )
        for letter in letters
    ]


async def _rows(store: RunStore, names: Sequence[str]) -> list[Values]:
    rows = list[Values]()
    for first in range(0, len(names), 1000):
        search = pb.SearchRolloutsRequest(rollout_ids=names[first : first + 1000], page_size=1000)
        rows += [rollout_row(each) for each in (await store.found(search)).rollouts]
    return rows


def _cause(letter: task_pb.DeadLetter) -> str:
    reason = enum_name(task_pb.DeadLetterReason, letter.reason).lower().replace("_", " ")
    return f"{reason}: {letter.message}" if letter.message else reason


def _group(name: str, state: str, cause: str | None, text: str, samples: list[Values]) -> Values:
    rewards = [row["reward"] for row in samples if row["reward"] is not None]
    return {
        "group_id": name,
        "task_text": text,
        "state": state,
        "cause": cause,
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_std": _spread(rewards) if rewards else None,
        "samples": sorted(samples, key=lambda row: str(row["rollout_id"])),
    }


def _spread(rewards: Sequence[float]) -> float:
    """0 if they differ by rounding alone, as the store and the metrics of the step count them."""
    return 0.0 if are_equal(rewards) else pstdev(rewards)
