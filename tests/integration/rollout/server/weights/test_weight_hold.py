"""A held version stays loaded though newer ones are committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from rollout.server.engine_lifecycle import WeightHold
from tests.integration.rollout.server.weights.test_weight_watcher import folder_with
from tests.lib.rollout.server.client import fake_config, serving
from tests.lib.rollout.server.weights.weight_service import TinyWeightService


def test_a_hold_ends_after_its_time() -> None:
    """It is renewed by holding again; None leaves it; 0 seconds end it."""
    now = [0.0]
    hold = WeightHold(lambda: now[0])
    assert hold.weight_version is None
    hold.set(3, 5.0)
    now[0] = 4.0
    hold.set(3, None)
    assert hold.weight_version == 3
    hold.set(3, 5.0)
    now[0] = 8.0
    assert hold.weight_version == 3
    hold.set(3, 0.0)
    assert hold.weight_version is None


@pytest.mark.parametrize("is_released", [True, False])
async def test_a_held_server_follows_again_afterwards(tmp_path: Path, is_released: bool) -> None:
    """Version 2 is committed during the hold and loaded at its end, by call or by time."""
    weights = TinyWeightService()
    await weights.publish(1, folder_with(tmp_path / "one", b"1"))
    async with (
        weights.serving() as port,
        serving(fake_config(weights=f"127.0.0.1:{port}")) as client,
    ):
        await client.serving(1)
        hold = Duration(seconds=60) if is_released else Duration(seconds=1)
        request = pb.UpdateWeightsRequest(weight_version=1, hold=hold)
        assert (await client.stub.UpdateWeights(request)).weight_version == 1
        await weights.publish(2, folder_with(tmp_path / "two", b"2"))
        if is_released:
            info = await client.stub.GetServerInfo(pb.GetServerInfoRequest())
            assert info.weight_version == 1
            end = pb.UpdateWeightsRequest(weight_version=1, hold=Duration())
            assert (await client.stub.UpdateWeights(end)).weight_version == 1
        await client.serving(2)


async def test_a_server_that_went_back_follows_again(tmp_path: Path) -> None:
    """No version is committed after the hold: its end alone makes the server load the newest."""
    weights = TinyWeightService()
    await weights.publish(1, folder_with(tmp_path / "one", b"1"))
    async with (
        weights.serving() as port,
        serving(fake_config(weights=f"127.0.0.1:{port}")) as client,
    ):
        await weights.publish(2, folder_with(tmp_path / "two", b"2"))
        await client.serving(2)
        request = pb.UpdateWeightsRequest(weight_version=1, hold=Duration(seconds=1))
        assert (await client.stub.UpdateWeights(request)).weight_version == 1
        await client.serving(2)
