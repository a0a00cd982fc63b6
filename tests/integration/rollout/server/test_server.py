"""The rollout server over real gRPC: calls, errors, pauses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from prometheus_client import REGISTRY
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from services.lib.token_bytes import unpack_ids
from tests.lib.rollout.server.client import Client, expected_tokens, fake_config, read, serving


def sampled() -> float:
    """Tokens sent by all servers of this process so far."""
    return REGISTRY.get_sample_value("seamflow_rollout_server_sampled_tokens_total") or 0.0


async def test_generate_streams_labelled_tokens() -> None:
    """Tokens come with log-probs, and with spans of server and weight version."""
    async with serving(fake_config()) as client:
        token_ids, versions, finish = await read(client.generate())
        assert token_ids == expected_tokens((3, 4, 5), [0] * 32)
        assert versions == [0] * 32
        assert finish == tokens_pb2.FINISH_REASON_LENGTH


async def test_server_info_says_what_the_server_is() -> None:
    """Constants, state and load are reported."""
    async with serving(fake_config(max_running=5, max_context=77)) as client:
        info = await client.info()
    assert (info.server_id, info.engine) == ("s1", "fake")
    assert (info.max_running, info.max_context, info.weight_version) == (5, 77, 0)
    assert info.state == pb.SERVER_STATE_SERVING
    assert "release_memory" in info.features


@pytest.mark.parametrize(
    ("call", "code", "named"),
    [
        (lambda c: read(c.generate((3, 64))), grpc.StatusCode.INVALID_ARGUMENT, r"token_ids\[1\]"),
        (lambda c: read(c.generate(top_p=7.0)), grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        (
            lambda c: read(c.stub.GenerateTokens(pb.GenerateTokensRequest(run_id="x"))),
            grpc.StatusCode.INVALID_ARGUMENT,
            "run_id",
        ),
        (lambda c: c.stub.Pause(pb.PauseRequest()), grpc.StatusCode.INVALID_ARGUMENT, "mode"),
        (
            lambda c: c.stub.UpdateWeights(pb.UpdateWeightsRequest()),
            grpc.StatusCode.FAILED_PRECONDITION,
            "has no weights service",
        ),
    ],
)
async def test_bad_calls_are_refused_by_name(
    call: Callable[[Client], Awaitable[object]], code: grpc.StatusCode, named: str
) -> None:
    """A wrong request gets a canonical code and a message that names the field."""
    async with serving(fake_config()) as client:
        with pytest.raises(grpc.aio.AioRpcError, match=named) as raised:
            await call(client)
        assert raised.value.code() is code
        assert (await read(client.generate()))[2] == tokens_pb2.FINISH_REASON_LENGTH


async def test_cancelled_call_frees_its_slot() -> None:
    """A caller that goes away leaves nothing running."""
    before = sampled()
    async with serving(fake_config(fake_step_seconds=0.002)) as client:
        call = client.generate(max_new_tokens=4000)
        await anext(aiter(call))
        assert (await client.info()).num_running == 1
        call.cancel()
        await client.until(lambda info: info.num_running + info.num_queued == 0)
    assert sampled() < before + 1000


async def test_pause_holds_turns_and_resume_goes_on() -> None:
    """During a retracting pause turns wait; afterwards they end as if nothing had happened."""
    async with serving(fake_config(fake_step_seconds=0.001)) as client:
        stream = aiter(client.generate(max_new_tokens=200))
        first = await anext(stream)
        paused = await client.stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_RETRACT))
        assert paused.num_turns == 1
        assert (await client.info()).state == pb.SERVER_STATE_PAUSED
        await client.stub.Resume(pb.ResumeRequest())
        rest, _, finish = await read(stream)
        assert [*unpack_ids(first.tokens.token_ids), *rest] == expected_tokens((3, 4, 5), [0] * 200)
        assert finish == tokens_pb2.FINISH_REASON_LENGTH


async def test_aborting_pause_interrupts_turns() -> None:
    """After an aborting pause running and new turns end INTERRUPTED, until resume."""
    async with serving(fake_config(fake_step_seconds=0.001)) as client:
        stream = aiter(client.generate(max_new_tokens=4000))
        await anext(stream)
        await client.stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT))
        assert (await read(stream))[2] == tokens_pb2.FINISH_REASON_INTERRUPTED
        assert (await read(client.generate()))[2] == tokens_pb2.FINISH_REASON_INTERRUPTED
        await client.stub.Resume(pb.ResumeRequest())
        assert (await read(client.generate()))[2] == tokens_pb2.FINISH_REASON_LENGTH
