"""What is refused by its size, and how threads are shared."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from seamflow.errors import ExhaustedError, InvalidRequestError, decode
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.prompt.prompt_lanes import PromptLanes
from services.chassis.errors import ServiceError
from services.chassis.rpc.request_budget import RequestBudget
from tests.integration.rollout.gateway.test_gateway import agent
from tests.lib.rollout.gateway.support import ScriptedServer, message, scripted
from tests.lib.rollout.gateway.tools import TOOLS

LARGE = 1 << 20


def talk(*messages: pb.Message, tools: int = 0) -> pb.Messages:
    """A prompt."""
    return pb.Messages(messages=messages, tools=[pb.Tool(name="t")] * tools)


@pytest.mark.parametrize(
    ("settings", "prompt", "named"),
    [
        ({"max_messages": 2}, talk(*[message("user", "a")] * 3), "max_messages"),
        ({"max_tools": 1}, talk(message("user", "a"), tools=2), "max_tools"),
        ({"max_message_bytes": 99}, talk(message("user", "a" * 99)), "max_message_bytes"),
        ({"max_prompt_bytes": 99}, talk(*[message("user", "a" * 30)] * 4), "max_prompt_bytes"),
        ({"max_prompt_tokens": 9}, talk(message("user", "abcdefghijk")), "max_prompt_tokens"),
        ({"max_prompt_tokens": 9}, pb.TokenIds(token_ids=[1] * 10), "max_prompt_tokens"),
    ],
)
async def test_a_prompt_beyond_a_limit_is_refused_by_its_name(
    settings: dict[str, int], prompt: pb.Messages | pb.TokenIds, named: str, tmp_path: Path
) -> None:
    """And within the defaults it is answered."""
    server = ScriptedServer()
    server.default_answer = [[7]]
    async with scripted(server) as address:
        for given, is_refused in ((settings, True), ({}, False)):
            folder = tmp_path / str(is_refused)
            async with agent(folder, address, template=TOOLS, **given) as ours:
                request = ours.request("t")
                where = "messages" if isinstance(prompt, pb.Messages) else "token_ids"
                getattr(request, where).CopyFrom(prompt)
                if not is_refused:
                    async for _ in ours.call(request):
                        pass
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in ours.call(request):  # on a slow machine heartbeats come first
                        pass
                failure = decode(caught.value)
                assert isinstance(failure, InvalidRequestError)
                assert named in str(failure)


async def test_a_request_beyond_what_grpc_receives_is_not_to_be_repeated(tmp_path: Path) -> None:
    """It names no time."""
    async with agent(tmp_path, max_request_bytes=1 << 16) as ours:
        request = ours.request("t")
        request.token_ids.CopyFrom(pb.TokenIds(token_ids=[1] * (1 << 16)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in ours.call(request):
                pass
        failure = decode(caught.value)
        assert isinstance(failure, ExhaustedError)
        assert failure.retry_after is None


async def test_a_rollout_has_only_so_many_turns_at_once(tmp_path: Path) -> None:
    """Further ones are asked to come again."""
    server = ScriptedServer()
    server.default_answer = [[7]]
    server.may_answer.clear()
    async with (
        scripted(server) as address,
        agent(tmp_path, address, max_calls_per_rollout=1) as ours,
    ):
        first = ours.generate("t1")
        await server.asked.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                event = await ours.generate("t2").read()
                assert event.WhichOneof("event") == "heartbeat"
        failure = decode(caught.value)
        assert failure.retry_after is not None
        assert "max_calls_per_rollout" in str(failure)
        server.may_answer.set()
        async for _ in first:
            pass


def test_bytes_in_progress_are_bounded_for_each_owner_and_for_all() -> None:
    """What has ended counts no more; the only request of an owner always passes."""
    budget = RequestBudget(80, 10)
    with budget.reserve(60, "a"):
        with pytest.raises(ServiceError, match="this rollout's share"), budget.reserve(1, "a"):
            pass
        with (
            budget.reserve(20, "b"),
            pytest.raises(ServiceError, match="max_inflight_bytes"),
            budget.reserve(1, "c"),
        ):
            pass
    with budget.reserve(1, "c"), budget.reserve(1, "c"):
        pass


class Busy:
    """Lanes whose threads work when they may."""

    def __init__(self, max_waiting: int = 100) -> None:
        self.lanes = PromptLanes(max_waiting)
        self.may_work = threading.Event()
        self.order: list[str] = []

    def work(self, owner: str, num_bytes: int = LARGE) -> asyncio.Task[Any]:
        """A job."""

        def job() -> None:
            self.may_work.wait(30)
            self.order.append(owner)

        return asyncio.create_task(self.lanes.run(owner, num_bytes, job))


async def test_rollouts_take_turns_in_a_lane() -> None:
    """One with many prompts delays the others by one."""
    busy = Busy()
    jobs = [busy.work("a") for _ in range(5)]
    await asyncio.sleep(0)
    jobs += [busy.work("b"), busy.work("c")]
    await asyncio.sleep(0)
    busy.may_work.set()
    await asyncio.gather(*jobs)
    assert busy.order == ["a", "a", "b", "c", "a", "a", "a"]
    busy.lanes.close()


async def test_short_prompts_do_not_wait_for_long_ones() -> None:
    """They have threads of their own; in one lane they would wait."""
    busy = Busy()
    long = busy.work("a")
    await asyncio.sleep(0)
    assert await busy.lanes.run("b", 10, lambda: 3) == 3
    assert busy.order == []
    busy.may_work.set()
    await long
    busy.lanes.close()


async def test_a_rollout_gets_its_share_of_the_waiting_prompts() -> None:
    """The others still find room."""
    busy = Busy(max_waiting=20)
    waiting = [busy.work("a") for _ in range(11)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceError, match="max_waiting_prompts"):
        await busy.work("a")
    other = busy.work("b")
    busy.may_work.set()
    await asyncio.gather(*waiting, other)
    busy.lanes.close()


async def test_what_fails_in_a_thread_fails_its_caller_alone() -> None:
    """The thread goes on."""
    lanes = PromptLanes(10)
    with pytest.raises(ZeroDivisionError):
        await lanes.run("a", 1, lambda: 1 // 0)
    assert await lanes.run("a", 1, lambda: 4) == 4
    lanes.close()
