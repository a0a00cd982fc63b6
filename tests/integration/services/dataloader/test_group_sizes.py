"""Tasks get as many rollouts as it takes for one to succeed, by what a real manager recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import task_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as trajectory

from services.chassis.errors import ConfigError, Reason, unavailable
from services.dataloader.curriculum import GroupSizes, SuccessRates
from tests.lib.dataloader.support import Queue, load, numbered, serving, write_jsonl
from tests.lib.ranker.support import manager, record, turn
from tests.unit.services.dataloader.test_curriculum import LEAST, MOST, settings


def recorded(task_id: str, outcomes: Sequence[float], name: str = "success") -> Any:
    """A group of closed rollouts with these rewards."""
    rollouts = [
        trajectory.RecordedRollout(
            turns=[turn("a", [1], 2)],
            rewards=tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name=name, value=value)]),
        )
        for value in outcomes
    ]
    return trajectory.RecordedGroup(task_id=task_id, payload_json="{}", rollouts=rollouts)


@asynccontextmanager
async def sizing(**changes: Any) -> AsyncIterator[tuple[Any, GroupSizes, list[float]]]:
    """A manager's stub, sizes that learn from it, and the time that they go by."""
    now = [0.0]
    async with (
        manager("run", group_size=8) as (address, stub),
        grpc.aio.insecure_channel(address) as channel,
    ):
        config = settings(address, **changes)
        yield stub, GroupSizes(config, SuccessRates(config, channel, lambda: now[0])), now


async def test_hard_tasks_get_more_rollouts() -> None:
    """Within the two limits; a task without rollouts gets the default."""
    async with sizing(num_samples=5) as (stub, sizes, _):
        groups = [
            recorded("never@0", [0.0] * 8),
            recorded("seldom@0", [1.0] + [0.0] * 7),
            recorded("often@0", [1.0] * 5 + [0.0] * 3),
            recorded("always@0", [1.0] * 8),
        ]
        await record(stub, "run", groups)
        await sizes.refresh()
        names = ("never", "seldom", "often", "always")
        found = [sizes.of(f"{name}@1") for name in names]
        assert found == sorted(found, reverse=True)
        assert found[0] == MOST
        assert found[0] > found[1] > found[2] >= found[3] == LEAST
        assert sizes.of("new@1") == 5


async def test_newer_rollouts_count_more() -> None:
    """A task that used to fail and now succeeds gets fewer, one that was forgotten more."""
    async with sizing() as (stub, sizes, now):
        await record(stub, "run", [recorded("a@0", [0.0] * 8), recorded("b@0", [1.0] * 8)])
        await sizes.refresh()
        before = sizes.of("a@1"), sizes.of("b@1")
        await record(stub, "run", [recorded("a@1", [1.0] * 8), recorded("b@1", [0.0] * 8)])
        now[0] += 60
        await sizes.refresh()
        assert sizes.of("a@2") < before[0]
        assert sizes.of("b@2") > before[1]
        # As often as not over all: the newer half decides.
        assert sizes.of("a@2") < sizes.of("b@2")


async def test_each_rollout_counts_once_and_refreshes_are_rate_limited() -> None:
    """A second refresh skips known rollouts; within seconds of the first it sends no request."""
    async with sizing() as (stub, sizes, now):
        await record(stub, "run", [recorded("a@0", [0.0] * 4 + [1.0] * 4)])
        await sizes.refresh()
        rates = sizes._rates
        once = rates.of("a@1")
        await record(stub, "run", [recorded("b@0", [1.0])])
        await sizes.refresh()
        assert (rates.of("a@1"), rates.of("b@1").count) == (once, 0)
        now[0] += 60
        await sizes.refresh()
        assert (rates.of("a@1"), rates.of("b@1").count) == (once, 1)


async def test_rollouts_without_the_reward_are_ignored() -> None:
    """Another reward is no success."""
    async with sizing(num_samples=3) as (stub, sizes, _):
        await record(stub, "run", [recorded("a@0", [0.0] * 8, name="length")])
        await sizes.refresh()
        assert sizes.of("a@1") == 3


async def test_a_refresh_that_hangs_does_not_block_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that does not exist yet, or a manager that does not answer."""
    async with manager("other") as (address, _), grpc.aio.insecure_channel(address) as channel:
        given = settings(address, num_samples=3)
        sizes = GroupSizes(given, SuccessRates(given, channel))
        await sizes.refresh()
        assert sizes.of("a@1") == 3
    monkeypatch.setattr("services.dataloader.curriculum._REFRESH_TIMEOUT_SECONDS", 0.1)
    async with grpc.aio.insecure_channel(address) as channel:
        given = settings(address, num_samples=3)
        sizes = GroupSizes(given, SuccessRates(given, channel))
        await sizes.refresh()
        assert sizes.of("a@1") == 3


class Growing(GroupSizes):
    """Decides otherwise each time it is asked."""

    def __init__(self, first: int) -> None:
        self._next = first

    async def refresh(self) -> None:
        """Nothing to see."""

    def of(self, task_id: str) -> int:
        """One more than the last."""
        self._next += 1
        return self._next


class Deaf(Queue):
    """Accepts tasks, and drops its answers until it is set to answer."""

    answers = False

    async def SubmitTasks(
        self, request: pb.SubmitTasksRequest, context: Any
    ) -> pb.SubmitTasksResponse:
        """Take them all the same."""
        taken = await super().SubmitTasks(request, context)
        if not self.answers:
            raise unavailable(Reason.STORE_UNAVAILABLE, "the answer is lost")
        return taken


@pytest.mark.parametrize("remembers", [True, False])
async def test_a_task_keeps_its_size_after_a_crash(tmp_path: Path, remembers: bool) -> None:
    """Submitted but not acknowledged: deciding its size again would be rejected."""
    state = tmp_path / "state.json"
    fields: dict[str, Any] = {"max_samples": 99, "state_file": state, "resume": True}
    given: dict[str, Any] = {**fields, "tasks": write_jsonl(tmp_path / "t.jsonl", numbered(5))}
    queue = Deaf()
    async with serving(queue) as address:
        loading = asyncio.create_task(load(address, Growing(10), **given))
        await queue.until(1)
        loading.cancel()
        await asyncio.wait([loading])
        submitted = {name: task.num_samples for name, task in queue.tasks.items()}
        queue.answers = True
        if remembers:
            await load(address, Growing(50), **given)
            assert len(queue.tasks) == 5
            assert {name: queue.tasks[name].num_samples for name in submitted} == submitted
            assert "sizes" not in json.loads(state.read_text())
        else:
            state.write_text(json.dumps({**json.loads(state.read_text()), "sizes": {}}))
            with pytest.raises(ConfigError, match="t0@0"):
                await load(address, Growing(50), **given)
