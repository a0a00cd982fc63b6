"""Each closed rollout of a run is listed once, while the list grows and shrinks."""

from __future__ import annotations

from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.lib.closed_rollouts import ClosedRollouts, task_name

RUNNING = trajectory_pb2.ROLLOUT_STATE_RUNNING
FINISHED = trajectory_pb2.ROLLOUT_STATE_FINISHED


def rollout(name: str, state: Any = FINISHED, purpose: Any = tokens_pb2.PURPOSE_TRAIN) -> Any:
    """A header."""
    return trajectory_pb2.Trajectory(rollout_id=name, state=state, purpose=purpose)


class Listing:
    """A trajectory manager that lists these rollouts."""

    def __init__(self, *rollouts: Any) -> None:
        self.rollouts = list(rollouts)

    async def ListTrajectories(  # as the contract names it
        self, request: pb.ListTrajectoriesRequest, **_: Any
    ) -> pb.ListTrajectoriesResponse:
        """A page, from the position in its token."""
        start = int(request.page_token)
        page = self.rollouts[start : start + request.page_size]
        return pb.ListTrajectoriesResponse(trajectories=page)


async def listed(closed: ClosedRollouts) -> list[str]:
    """The names that are new."""
    return [header.rollout_id async for batch in closed.new() for header in batch]


def closed_rollouts(store: Any, max_rollouts: int = 16_384) -> ClosedRollouts:
    """Of a run."""
    return ClosedRollouts(store, "run", max_rollouts)


async def test_each_comes_once_as_it_is_closed() -> None:
    """One that runs on does not hold up the others."""
    store = Listing(rollout("a"), rollout("b", RUNNING), rollout("c"))
    closed = closed_rollouts(store)
    assert await listed(closed) == ["a", "c"]
    assert await listed(closed) == []
    store.rollouts[1] = rollout("b")
    store.rollouts.append(rollout("d"))
    assert await listed(closed) == ["b", "d"]


async def test_evaluations_are_left_out() -> None:
    """They say nothing about what is trained."""
    store = Listing(rollout("a", purpose=tokens_pb2.PURPOSE_EVAL), rollout("b"))
    assert await listed(closed_rollouts(store)) == ["b"]


async def test_a_batch_that_was_not_worked_through_comes_again() -> None:
    """At least once; the batches before it do not."""
    closed = closed_rollouts(Listing(*(rollout(str(number)) for number in range(20))))
    async for batch in closed.new():
        if batch[0].rollout_id == "8":
            break
    assert await listed(closed) == [str(number) for number in range(8, 20)]


async def test_old_groups_may_be_deleted() -> None:
    """The list shrinks at its beginning; what follows is found all the same, once."""
    store = Listing(*(rollout(str(number)) for number in range(30)))
    closed = closed_rollouts(store)
    assert len(await listed(closed)) == 30
    del store.rollouts[:25]
    store.rollouts.append(rollout("new"))
    assert await listed(closed) == ["new"]


async def test_of_a_long_list_the_newest_count() -> None:
    """A service that starts late does not read them all."""
    store = Listing(*(rollout(str(number)) for number in range(2500)))
    assert await listed(closed_rollouts(store, 10)) == [str(number) for number in range(2490, 2500)]


def test_a_task_has_its_name_without_its_epoch() -> None:
    """Other signs of that kind are part of the name."""
    names = ("a@3", "a", "a@b", "@3", "a@1@2")
    assert [task_name(each) for each in names] == ["a", "a", "a@b", "@3", "a@1"]
