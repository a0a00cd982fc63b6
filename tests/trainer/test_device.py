"""Suspension is fenced by epochs, waits for the step in progress, and loses no bit."""

from __future__ import annotations

import asyncio

import pytest
import torch

from services.chassis.errors import Reason, ServiceError
from trainer.commands import Command, Release
from trainer.device import Device
from trainer.device_state import DeviceState


class Gang:
    """Remembers its commands."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    async def do(self, command: Command) -> list[dict[str, float]]:
        """Two ranks that free 8 bytes each."""
        self.commands.append(command)
        return [{"num_bytes": 8}, {"num_bytes": 8}] if isinstance(command, Release) else [{}, {}]


@pytest.fixture
def device() -> Device:
    """Of a gang of two."""
    return Device(Gang())


async def nothing() -> None:
    """Nodes that are always ours."""


async def test_an_older_epoch_is_refused_and_the_same_one_is_idempotent(device: Device) -> None:
    """ABORTED / STALE_EPOCH; a repeated Suspend answers the same bytes and does nothing."""
    assert await device.suspend(3) == 16
    assert await device.suspend(3) == 16
    assert len(device._gang.commands) == 1
    with pytest.raises(ServiceError) as caught:
        await device.resume(2)
    assert caught.value.reason == Reason.STALE_EPOCH
    assert device.suspended
    await device.resume(4)
    assert not device.suspended


async def test_suspend_waits_for_the_step_and_the_next_step_for_resume(device: Device) -> None:
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


async def test_a_suspend_that_was_overtaken_is_refused(device: Device) -> None:
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
