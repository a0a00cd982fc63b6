"""Suspension is fenced by epochs, waits for the step in progress, and loses no bit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from services.chassis.errors import Reason, ServiceError
from trainer.commands import Command, Release, Restore
from trainer.ranks.device_lease import DeviceLease
from trainer.ranks.rank_group import RankGroup
from trainer.ranks.worker import DeviceState


class FakeRankGroup(RankGroup):
    """Remembers its commands, of which the next `num_failing` fail."""

    nodes = ("a", "b")

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.num_failing = 0

    @property
    def rank0(self) -> Any:
        """All that is asked of it."""
        return self

    async def do(self, command: Command) -> list[dict[str, float]]:
        """Two ranks that free 8 bytes each."""
        self.commands.append(command)
        if self.num_failing:
            self.num_failing -= 1
            raise RuntimeError("rank 1: out of memory")
        return [{"num_bytes": 8}, {"num_bytes": 8}] if isinstance(command, Release) else [{}, {}]


@pytest.fixture
def ranks() -> FakeRankGroup:
    """A gang of two."""
    return FakeRankGroup()


@pytest.fixture
def device(ranks: FakeRankGroup) -> DeviceLease:
    """Of `ranks`."""
    return DeviceLease(ranks)


async def nothing() -> None:
    """Nodes that are always ours."""


async def test_an_older_epoch_is_rejected_and_the_same_one_is_idempotent(
    device: DeviceLease,
    ranks: FakeRankGroup,
) -> None:
    """ABORTED / STALE_EPOCH; a repeated Suspend answers the same bytes and does nothing."""
    assert await device.suspend(3) == 16
    assert await device.suspend(3) == 16
    assert len(ranks.commands) == 1
    with pytest.raises(ServiceError) as caught:
        await device.resume(2)
    assert caught.value.reason == Reason.STALE_EPOCH
    assert device.suspended
    await device.resume(4)
    assert not device.suspended


async def test_suspend_waits_for_the_step_and_the_next_step_for_resume(device: DeviceLease) -> None:
    """Within `use` nothing is moved; while suspended `use` does not begin, and asks for nodes."""
    asked = 0

    async def acquire() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            await device.resume(2)

    async with device.use(nothing):
        suspending = asyncio.create_task(device.suspend(1))
        await asyncio.sleep(0)
        assert not device.suspended
    await suspending
    async with device.use(acquire):
        assert asked == 2
        assert not device.suspended


async def test_a_suspend_that_was_overtaken_is_rejected(device: DeviceLease) -> None:
    """A newer Resume arrives while the older Suspend waits for the step: it has no effect."""
    async with device.use(nothing):
        older = asyncio.create_task(device.suspend(1))
        await asyncio.sleep(0)
        newer = asyncio.create_task(device.resume(2))
        await asyncio.sleep(0)
    with pytest.raises(ServiceError):
        await older
    await newer
    assert not device.suspended


async def test_a_gang_moves_once_all_its_nodes_have_given_their_devices() -> None:
    """Each node is fenced by separate epochs; suspending one suspends all ranks."""
    ranks = FakeRankGroup()
    device = DeviceLease(ranks, num_nodes=2)
    await device.start_suspended()
    first = asyncio.create_task(device.resume(8, "a"))
    await asyncio.sleep(0)
    assert device.suspended
    await device.resume(7, "b")
    await first
    assert not device.suspended
    assert await device.suspend(9, "b") == 8, "of 16 bytes in all"
    assert await device.suspend(10, "a") == 8
    assert [type(command) for command in ranks.commands] == [Release, Restore, Release]


async def test_a_node_that_went_without_goodbye_stands_in_for_no_other() -> None:
    """Its agent died and another node took its place: the first one that suspends suspends all."""
    one = DeviceLease(FakeRankGroup())
    await one.resume(1, "dead")
    await one.resume(2, "b")
    assert await one.suspend(3, "b") == 16
    assert one.suspended
    two = DeviceLease(FakeRankGroup(), num_nodes=2)
    await asyncio.gather(two.resume(1, "dead"), two.resume(1, "b"))
    await two.resume(2, "c")
    await two.suspend(3, "b")
    assert two.suspended
    resumed = asyncio.create_task(two.resume(3, "c"))
    await asyncio.sleep(0)
    assert two.suspended, "what was given before counts no more"
    await two.resume(4, "b")
    await resumed
    assert not two.suspended


async def test_only_the_nodes_of_its_ranks_make_a_gang_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ranks on A and B, devices of A and C start nothing, and B is not told it is free."""
    monkeypatch.setattr("trainer.ranks.device_lease._GANG_SECONDS", 0.0)
    bound = DeviceLease(FakeRankGroup(), num_nodes=2, nodes=("a", "b"))
    await bound.start_suspended()
    with pytest.raises(ServiceError, match=r"2 nodes \(a, b\) and was granted: a"):
        await bound.resume(1, "a")
    with pytest.raises(ServiceError, match="no rank runs on c"):
        await bound.resume(1, "c")
    assert bound.suspended
    assert bound.is_suspended("c")
    await bound.resume(2, "b")
    assert not bound.suspended
    assert bound.is_suspended("c")
    assert not bound.is_suspended("b")
    assert await bound.suspend(3, "b") == 8, "its rank's bytes"
    # Negative control: where nobody knows where the ranks run, any two nodes are enough.
    counted = DeviceLease(FakeRankGroup(), num_nodes=2)
    await asyncio.gather(counted.resume(1, "a"), counted.resume(1, "c"))
    assert not counted.suspended


@pytest.mark.parametrize(("old", "new"), [("", "a"), ("a", "")])
async def test_a_node_that_got_or_lost_its_name_is_the_same_one(
    device: DeviceLease, old: str, new: str
) -> None:
    """An agent of another release came up on the node: what it takes is what the old one gave."""
    await device.resume(1, old)
    assert not device.is_suspended(new)
    assert await device.suspend(2, new) == 16
    assert device.suspended


async def test_a_release_that_failed_is_no_success_when_it_is_asked_again(
    device: DeviceLease,
    ranks: FakeRankGroup,
) -> None:
    """Until it succeeded the device counts as taken, and half moved state is not trained with."""
    ranks.num_failing = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            await device.suspend(1, "a")
        assert not device.suspended
        assert not device._held.is_set()
    assert await device.suspend(1, "a") == 16
    assert device.suspended


async def test_a_restore_that_failed_is_undone_before_the_device_goes_to_others(
    device: DeviceLease,
    ranks: FakeRankGroup,
) -> None:
    """Some ranks may have their memory: it is neither trained with nor taken for free."""
    await device.suspend(1, "a")
    ranks.num_failing = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        await device.resume(2, "a")
    assert not device.suspended
    assert not device._held.is_set()
    await device.suspend(3, "spare")
    assert not device.suspended, "nothing that another node waits for"
    await device.suspend(3, "a")
    assert device.suspended
    await device.resume(4, "a")
    assert not device.suspended
    commands = [type(command) for command in ranks.commands]
    assert commands == [Release, Restore, Release, Restore]


async def test_a_node_without_its_gang_may_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UNAVAILABLE names who is there; nothing has moved, and a newer order of the node counts."""
    monkeypatch.setattr("trainer.ranks.device_lease._GANG_SECONDS", 0.0)
    device = DeviceLease(FakeRankGroup(), num_nodes=2)
    await device.start_suspended()
    with pytest.raises(ServiceError, match="needs 2 nodes and was granted: a") as caught:
        await device.resume(3, "a")
    assert caught.value.reason == Reason.DEPENDENCY_UNAVAILABLE
    await device.suspend(4, "a")
    with pytest.raises(ServiceError, match="was granted: b"):
        await device.resume(5, "b")
    assert device.suspended
    await device.resume(6, "a")
    assert not device.suspended


async def test_a_node_outside_the_gang_takes_nothing_from_it(device: DeviceLease) -> None:
    """A spare node begins to roll out while the gang trains: there, nothing is held."""
    await device.resume(1, "a")
    assert device.is_suspended("spare")
    async with device.use(nothing):  # nor does it wait for the step
        assert await device.suspend(2, "spare") == 0
    assert not device.suspended
    assert not device.is_suspended("a")


async def test_a_suspend_moves_state_out_even_if_the_node_is_replaced(
    device: DeviceLease,
    ranks: FakeRankGroup,
) -> None:
    """Another node gives its device while the first one waits for the step: out, and in again."""
    await device.resume(1, "a")
    async with device.use(nothing):
        leaving = asyncio.create_task(device.suspend(2, "a"))
        await asyncio.sleep(0)
        following = asyncio.create_task(device.resume(1, "b"))
        await asyncio.sleep(0)
    await asyncio.gather(leaving, following)
    assert [type(command) for command in ranks.commands] == [Release, Restore]
    assert not device.is_suspended("b")
    assert device.is_suspended("a")


def test_released_storage_is_gone_and_comes_back_bit_equal_under_every_view() -> None:
    """Two views of one storage count once; both see the content again."""
    tensor = torch.randn(6, 4, dtype=torch.float64)
    other = torch.randn(3)
    view, expected = tensor[2:], tensor.clone()
    state = DeviceState()
    assert state.release([tensor, view, other]) == 6 * 4 * 8 + 3 * 4
    assert state.released
    assert tensor.untyped_storage().nbytes() == 0
    state.restore()
    assert not state.released
    assert tensor.equal(expected)
    assert view.equal(expected[2:])


def test_a_restore_that_failed_halfway_can_be_repeated_and_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copies are kept until everything is back, so no bit is lost and no byte kept."""
    tensors = [torch.randn(4), torch.randn(5)]
    expected = [tensor.clone() for tensor in tensors]
    state = DeviceState()
    state.release(tensors)
    num_done = 0

    def failing(storage: torch.UntypedStorage) -> torch.Tensor:
        nonlocal num_done
        num_done += 1
        if num_done == 2:
            raise RuntimeError("out of memory")
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    monkeypatch.setattr("trainer.ranks.worker._bytes", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        state.restore()
    assert tensors[0].untyped_storage().nbytes()
    assert state.release(tensors) == 4 * 4 + 5 * 4
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    state.restore()
    assert all(map(torch.equal, tensors, expected))
