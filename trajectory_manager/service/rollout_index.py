"""Searches of a run's rollouts, newest first, by rows of the index.

A rollout without a row is running, or finished while there was no index: its header is read, and
if it has finished its row is added. A call looks at a bounded number of rollouts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from seamflow.trajectory.v1.trajectory_service_pb2 import SearchRolloutsRequest

from trajectory_manager.model.records import Rollout, RolloutState, RolloutSummary, SlotName
from trajectory_manager.model.runs import RunConfig
from trajectory_manager.model.tokens import Origin, Turn
from trajectory_manager.store.redis.connect import Store
from trajectory_manager.store.redis.inspection_store import Row

_MAX_ROWS, _MAX_HEADERS = 5000, 300
"""What one call reads at most."""
_BATCH, _HEADER_BATCH = 500, 50
_NUMBERS = (
    *("purpose", "state", "failure_class", "min_tokens", "max_tokens", "min_turns", "max_turns"),
)
"""What a search may ask for, beside rewards; 0: nothing."""


@dataclass(slots=True, kw_only=True)
class Found:
    summaries: list[RolloutSummary] = field(default_factory=list)
    next_start: int = 0
    """Where the search continues; 0: it is over."""
    num_searched: int = 0
    num_started: int = 0
    num_unindexed: int = 0


class RolloutSearch:
    def __init__(self, store: Store, *, keeps_rows: bool = True) -> None:
        """`keeps_rows`: whether rows are added that were missing."""
        self._store = store
        self._keeps_rows = keeps_rows

    async def newest(
        self, run_id: str, wanted: SearchRolloutsRequest, before: int, limit: int
    ) -> Found:
        """Rollouts that were started before number `before`; 0: from the newest."""
        found, num_headers = Found(next_start=before), 0
        batch = _BATCH if _asks(wanted) else limit
        while found.num_searched < _MAX_ROWS and num_headers < _MAX_HEADERS:
            page = await self._store.inspection.newest(run_id, found.next_start, batch)
            found.num_started, found.num_unindexed = page.num_started, page.num_unindexed
            rows = _first(page.rows, _MAX_HEADERS - num_headers)
            num_headers += sum(map(_lacks_summary, rows))
            num_seen = await self._collect(run_id, wanted, rows, limit, found)
            found.next_start = rows[num_seen - 1].number if num_seen else 0
            if num_seen == len(page.rows) < batch:
                found.next_start = 0
            if not found.next_start or len(found.summaries) == limit:
                break
        return await self._with_steps(run_id, found)

    async def among(
        self,
        run_id: str,
        wanted: SearchRolloutsRequest,
        rollout_ids: Sequence[str],
        start: int,
        limit: int,
    ) -> Found:
        """Those of `rollout_ids` from place `start` on, in their order."""
        found, names = Found(), rollout_ids[start : start + _BATCH]
        rows = _first(await self._store.inspection.rows(run_id, names), _MAX_HEADERS)
        end = start + await self._collect(run_id, wanted, rows, limit, found)
        found.next_start = end if end < len(rollout_ids) else 0
        return await self._with_steps(run_id, found)

    async def _collect(
        self,
        run_id: str,
        wanted: SearchRolloutsRequest,
        rows: Sequence[Row],
        limit: int,
        found: Found,
    ) -> int:
        """Add the wanted ones of `rows` to `found` until it has `limit`; how many were seen."""
        num_seen = 0
        async for row in self._read(run_id, rows):
            num_seen += 1
            if row.summary is not None and _is_wanted(wanted, row.summary):
                found.summaries.append(row.summary)
            if len(found.summaries) == limit:
                break
        found.num_searched += num_seen
        return num_seen

    async def _read(self, run_id: str, rows: Sequence[Row]) -> AsyncIterator[Row]:
        """The rows, with the summaries of those that had none if there is such a rollout."""
        for start in range(0, len(rows), _HEADER_BATCH):
            batch = rows[start : start + _HEADER_BATCH]
            missing = [row.rollout_id for row in batch if _lacks_summary(row)]
            known = await self._from_headers(run_id, missing) if missing else {}
            for row in batch:
                name = row.rollout_id
                yield row._replace(summary=known[name]) if name in known else row

    async def _from_headers(
        self, run_id: str, names: Sequence[str]
    ) -> dict[str, RolloutSummary | None]:
        config = await self._store.runs.config(run_id)
        read = await self._store.tokens.read(run_id, names, spans_only=True)
        found = {
            name: summary_of(*each, config) if each is not None else None
            for name, each in zip(names, read, strict=True)
        }
        if self._keeps_rows:
            closed = {name: each for name, each in found.items() if _is_final(name, each)}
            await self._store.inspection.keep(run_id, closed)
        return found

    async def _with_steps(self, run_id: str, found: Found) -> Found:
        """The page with the steps that committed what no trainer recorded."""
        names = [each.rollout_id for each in found.summaries if not each.step]
        steps = await self._store.ledger.committed_steps(run_id, names) if names else []
        by_name = dict(zip(names, steps, strict=True))
        found.summaries = [
            each._replace(step=by_name.get(each.rollout_id, each.step)) for each in found.summaries
        ]
        return found


def _asks(wanted: SearchRolloutsRequest) -> bool:
    """Whether some rollouts will not do."""
    rewards = (wanted.HasField("min_reward"), wanted.HasField("max_reward"))
    return any(rewards) or any(getattr(wanted, name) for name in _NUMBERS)


def _is_wanted(wanted: SearchRolloutsRequest, found: RolloutSummary) -> bool:
    return (
        wanted.purpose in (0, found.purpose)
        and wanted.state in (0, found.state)
        and wanted.failure_class in (0, found.failure_class)
        and found.num_tokens >= wanted.min_tokens
        and (not wanted.max_tokens or found.num_tokens <= wanted.max_tokens)
        and found.num_turns >= wanted.min_turns
        and (not wanted.max_turns or found.num_turns <= wanted.max_turns)
        and _has_reward(wanted, found.reward)
    )


def _has_reward(wanted: SearchRolloutsRequest, reward: float | None) -> bool:
    is_least, is_most = wanted.HasField("min_reward"), wanted.HasField("max_reward")
    if reward is None:
        return not (is_least or is_most)
    is_enough = not is_least or wanted.min_reward <= reward
    return is_enough and (not is_most or reward <= wanted.max_reward)


def _lacks_summary(row: Row) -> bool:
    return row.summary is None and not row.deleted


def _first(rows: Sequence[Row], max_headers: int) -> Sequence[Row]:
    """The first of `rows`, such that at most so many headers must be read for them."""
    lacking = [place for place, row in enumerate(rows) if _lacks_summary(row)]
    return rows[: lacking[max_headers]] if len(lacking) > max_headers else rows


def _is_final(rollout_id: str, summary: RolloutSummary | None) -> bool:
    """Whether a rollout has finished, or was deleted: only one with a lease may still start."""
    if summary is None:
        return SlotName.parse(rollout_id) is not None
    return summary.state != int(RolloutState.RUNNING)


def summary_of(rollout: Rollout, turns: Sequence[Turn], config: RunConfig) -> RolloutSummary:
    """The summary of a rollout, whose turns have at least their spans."""
    spans = [span for turn in turns for span in turn.tokens.spans]
    sampled = [span for span in spans if span.origin is Origin.POLICY]
    versions = [span.weight_version for span in sampled] or [-1]
    return RolloutSummary(
        rollout_id=rollout.rollout_id,
        purpose=int(rollout.purpose),
        state=int(rollout.state),
        failure_class=int(rollout.outcome.failure_class),
        finish_reason=turns[-1].finish_reason if turns else 0,
        truncated=rollout.outcome.truncated,
        in_group=bool(rollout.group_id),
        num_turns=len(turns),
        num_tokens=sum(span.num_tokens for span in spans),
        num_policy_tokens=sum(span.num_tokens for span in sampled),
        min_weight_version=min(versions),
        max_weight_version=max(versions),
        reward=_reward(rollout.outcome.totals, config),
        create_time=rollout.create_time,
        finish_time=rollout.finish_time,
        step=0,
    )


def _reward(totals: dict[str, float], config: RunConfig) -> float | None:
    name = config.reward_name or config.zero_variance_reward
    if name or len(totals) != 1:
        return totals.get(name)
    return next(iter(totals.values()))
