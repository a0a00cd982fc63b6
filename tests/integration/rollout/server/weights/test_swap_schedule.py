"""When servers change over to new weights: a few at a time, or when turns have ended."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc.aio
import pytest
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.server.weights.swap_schedule import RollingOrder, RunningTurns, SwapSchedule
from services.chassis.rpc.server import started
from services.weights.config import WeightsConfig
from tests.lib.rollout.server.client import expected_tokens, fake_config, read, serving
from tests.lib.rollout.server.support import settle
from tests.lib.rollout.server.weights.weight_service import TinyWeightService
from tests.lib.weights.support import in_memory

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

SERVERS = 7


async def most_at_once(stack: AsyncExitStack, folder: Path, limit: int | None) -> int:
    """Let servers change weights all at once; how many were in the middle of it, at most."""
    config = WeightsConfig(
        redis_url="redis://oracle",
        folder=folder,
        port=0,
        drain_seconds=0.0,
        rolling_servers=limit or 1,
    )
    service = in_memory(config)
    port = await stack.enter_async_context(started(service, config, "weights"))
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    stub = async_stub(WeightServiceStub, channel)
    inside = most = 0

    async def change(number: int) -> None:
        nonlocal inside, most
        order = RollingOrder(
            stub=stub,
            run_id="run",
            model="policy",
            server_id=f"s{number}",
        )
        async with SwapSchedule(order=order if limit else None).slot():
            inside += 1
            most = max(most, inside)
            await settle()
            inside -= 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(SERVERS):
            tasks.create_task(change(number))
    return most


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_rolling_update_takes_no_more_servers_than_it_may(
    tmp_path: Path, limit: int
) -> None:
    """Never more than rolling_servers of a run change weights at the same time; all get there."""
    async with AsyncExitStack() as stack:
        assert await most_at_once(stack, tmp_path, limit) <= limit


async def test_at_once_takes_all(tmp_path: Path) -> None:
    """Negative control: without the order they all change together."""
    async with AsyncExitStack() as stack:
        assert await most_at_once(stack, tmp_path, None) == SERVERS


async def test_a_silent_weights_service_holds_no_update_back() -> None:
    """A wait for a slot ends at its timeout, and the swap proceeds."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        stub = async_stub(WeightServiceStub, channel)
        order = RollingOrder(stub=stub, run_id="run", model="policy", server_id="s1")
        async with asyncio.timeout(10), SwapSchedule(order=order, wait_seconds=0.1).slot():
            pass


class CountingOrder:
    """A weights service that lends one place for a moment, and counts who asks."""

    def __init__(self, refusal: grpc.StatusCode | None = None) -> None:
        self.refusal = refusal
        self.asked = 0
        self.asked_thrice = asyncio.Event()

    async def AcquireSwap(
        self, request: pb.AcquireSwapRequest, timeout: float
    ) -> pb.AcquireSwapResponse:
        """Grant it, or return an error."""
        self.asked += 1
        if self.asked == 3:
            self.asked_thrice.set()
        if self.refusal is not None:
            empty = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(self.refusal, empty, empty, details="not you")
        response = pb.AcquireSwapResponse(granted=True)
        response.ttl.FromMilliseconds(30)
        return response

    async def ReleaseSwap(self, request: pb.ReleaseSwapRequest, timeout: float) -> None:
        """Nothing is held."""


async def test_a_weights_service_that_ends_is_asked_again() -> None:
    """What it cancels on its way out is no refusal."""
    stub = CountingOrder(refusal=grpc.StatusCode.CANCELLED)
    order = RollingOrder(
        stub=cast("WeightServiceAsyncStub", stub), run_id="run", model="policy", server_id="s1"
    )
    acquiring = asyncio.create_task(order.acquire())
    await stub.asked_thrice.wait()
    stub.refusal = None
    assert await acquiring > 0


async def test_a_place_is_kept_for_as_long_as_the_change_lasts() -> None:
    """It is asked for again and again before it expires, and no more once it is given back."""
    stub = CountingOrder()
    order = RollingOrder(
        stub=cast("WeightServiceAsyncStub", stub), run_id="run", model="policy", server_id="s1"
    )
    async with asyncio.timeout(10), SwapSchedule(order=order).slot():
        await stub.asked_thrice.wait()
    asked = stub.asked
    await settle()
    assert stub.asked == asked


async def test_a_refusal_for_good_is_not_asked_about_again() -> None:
    """The swap proceeds immediately, without an order."""
    stub = CountingOrder(grpc.StatusCode.PERMISSION_DENIED)
    order = RollingOrder(
        stub=cast("WeightServiceAsyncStub", stub), run_id="run", model="policy", server_id="s1"
    )
    async with asyncio.timeout(10), SwapSchedule(order=order, wait_seconds=1e6).slot():
        assert stub.asked == 1


async def test_a_turn_boundary_waits_for_the_turns_that_run_and_no_others() -> None:
    """Turns that begin during the wait are not waited for: they would never all have ended."""
    turns = RunningTurns()
    reached = asyncio.Event()

    async def change() -> None:
        async with SwapSchedule(turns=turns, wait_seconds=60).slot():
            reached.set()

    with turns.running():
        changing = asyncio.create_task(change())
        await settle()
        later = turns.running()
        later.__enter__()
        assert not reached.is_set()
    await asyncio.wait_for(changing, 10)
    later.__exit__(None, None, None)


async def test_a_turn_that_does_not_end_is_not_waited_for_longer_than_told() -> None:
    """The deadline of the wait holds."""
    turns = RunningTurns()
    with turns.running():
        async with asyncio.timeout(10), SwapSchedule(turns=turns, wait_seconds=0.05).slot():
            pass


@pytest.mark.parametrize(
    ("settings", "mixed"),
    [({"weight_update_at": "turn"}, False), ({"weight_update_at": "token"}, True)],
)
async def test_a_turn_ends_under_the_weights_it_began_with(
    tmp_path: Path, settings: dict[str, Any], mixed: bool
) -> None:
    """`turn` keeps a running turn whole, the next has the new weights; `token` cuts through."""
    weights = TinyWeightService()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.safetensors").write_bytes(b"1")
    async with weights.serving() as port:
        config = fake_config(weights=f"127.0.0.1:{port}", fake_step_seconds=0.002, **settings)
        async with serving(config) as client:
            await client.serving(0)
            turn = asyncio.create_task(read(client.generate(max_new_tokens=400)))
            await client.until(lambda info: info.num_running == 1)
            await weights.publish(1, tmp_path / "one")
            token_ids, versions, _ = await turn
            await client.serving(1)
            assert (await read(client.generate()))[1] == [1] * 32
    assert (set(versions) == {0, 1}) == mixed
    assert token_ids == expected_tokens((3, 4, 5), versions)
