"""A call survives a broken connection: no token lost, none doubled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from seamflow import Client, Drift, Rollout, Turn, WeightSpan
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import InvalidRequestError, SeamflowError
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.token_log import TokenLog

from tests.sdk.support import TOKENS, Gateway, serving


@asynccontextmanager
async def rollout_on(gateway: Gateway, **options: object) -> AsyncIterator[Rollout]:
    """A rollout that talks to this gateway."""
    async with (
        serving(gateway.added()) as address,
        Client(address, run_id="run", **options) as client,  # type: ignore[arg-type]
    ):
        yield await client.start_rollout("r")


async def answer(gateway: Gateway) -> Turn:
    """One turn from this gateway."""
    async with rollout_on(gateway) as rollout, asyncio.timeout(10):
        return await rollout.generate([{"role": "user", "content": "hi"}], turn_id="t")


async def test_a_turn_holds_what_was_sampled() -> None:
    """Ids, log-probs, spans, text and the end arrive as the gateway sent them."""
    turn = await answer(Gateway())
    assert turn.token_ids == TOKENS
    assert turn.logprobs == [-0.5 * i for i in TOKENS]
    assert (turn.text, turn.finish_reason, turn.num_prompt_tokens) == ("hello", "stop", 3)
    assert turn.drift is None


async def test_an_agent_that_does_not_look_on_gets_its_tokens_seldom() -> None:
    """One that does gets them as they are sampled; either may set another interval."""
    gateway = Gateway()
    async with rollout_on(gateway) as rollout:
        await rollout.generate(token_ids=[1])
        await rollout.generate(token_ids=[1], on_tokens=lambda tokens: None)
        await rollout.generate(token_ids=[1], chunk_seconds=0.25)
        await rollout.generate(token_ids=[1], chunk_seconds=0.5, on_tokens=lambda tokens: None)
    assert gateway.chunk_seconds == [1.0, 0.0, 0.25, 0.5]


async def test_a_turn_tells_of_drift() -> None:
    """An agent that re-tokenised what was sampled learns where, and both texts."""
    gateway = Gateway()
    gateway.drift = pb.Drift(position=7, recorded_text="hel lo", retokenized_text="hello")
    turn = await answer(gateway)
    assert turn.drift == Drift(position=7, recorded_text="hel lo", retokenized_text="hello")


@pytest.mark.parametrize("breaks", [[0], [1], [5], [9], [2, 2, 7], [0, 3, 3, 3]])
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED])
async def test_a_broken_stream_goes_on_where_it_broke(
    breaks: list[int], code: grpc.StatusCode
) -> None:
    """Each new call asks for the first token not yet seen, whoever broke the last one."""
    gateway = Gateway(breaks, code)
    turn = await answer(gateway)
    assert turn.token_ids == TOKENS
    # A stream that fails before its first element may be repeated by gRPC itself.
    assert [o for i, o in enumerate(gateway.offsets) if o not in gateway.offsets[:i]] == sorted(
        {0, *breaks}
    )


async def test_spans_count_from_the_first_sampled_token() -> None:
    """A turn that two servers made says which tokens are whose."""
    turn = await answer(Gateway([4]))
    first = WeightSpan(start=0, num_tokens=2, weight_version=1, server_id="server-1")
    assert turn.spans[0] == first
    assert [(s.start, s.weight_version) for s in turn.spans] == [
        (0, 1),
        (2, 1),
        (4, 2),
        (6, 2),
        (8, 2),
    ]


class ForgetsOffsets(Gateway):
    """A gateway that ignores the caller's offset, as a naive one would."""

    async def Generate(
        self, request: pb.GenerateRequest, context: object
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Always from the start."""
        request.resume_from_offset = 0
        async for event in super().Generate(request, context):
            yield event


async def test_doubled_tokens_are_refused() -> None:
    """A gateway that sends tokens again breaks its contract, and the client says so."""
    with pytest.raises(SeamflowError, match="expected 4"):
        await answer(ForgetsOffsets([4]))


async def test_a_client_that_ignores_offsets_would_double_tokens() -> None:
    """Negative control: the same broken stream, read again from the start, doubles 4 tokens."""
    received: list[int] = []
    gateway = ForgetsOffsets([4])

    def observer(rollout_id: str, turn_id: str, chunk: pb.TokenChunk) -> None:
        received.extend(chunk.tokens.token_ids)
        chunk.offset = len(received) - len(chunk.tokens.token_ids)  # hide what the client checks

    async with rollout_on(gateway, observer=observer) as rollout:
        turn = await rollout.generate(token_ids=[1])
    assert turn.token_ids == TOKENS[:4] + TOKENS


async def test_a_refusal_is_raised() -> None:
    """What no retry can cure reaches the caller."""
    with pytest.raises(InvalidRequestError):
        await answer(Gateway([2], grpc.StatusCode.INVALID_ARGUMENT))


async def test_a_turn_has_a_deadline() -> None:
    """A gateway that stays away does not hold the agent for ever."""
    async with Client("127.0.0.1:1", run_id="run") as client:
        rollout = Rollout(client._stub, "run", "r", "")
        with pytest.raises(TimeoutError):
            await rollout.generate(token_ids=[1], timeout=0.2)


async def test_a_rollout_closes_with_rewards_or_with_a_failure() -> None:
    """One number is the reward; several carry names; a failure has a class and no reward."""
    gateway = Gateway()
    async with rollout_on(gateway) as rollout:
        await rollout.finish(0.5)
        await rollout.finish({"reward": 1, "length": 3})
        await rollout.fail(tokens_pb2.FAILURE_CLASS_ENVIRONMENT, "no browser")
    one, two, failed = gateway.finished
    assert [(r.name, r.value) for r in one.rewards] == [("reward", 0.5)]
    assert [(r.name, r.value) for r in two.rewards] == [("reward", 1.0), ("length", 3.0)]
    assert (failed.failure_message, len(failed.rewards)) == ("no browser", 0)
    assert one.credential == "credential of r"


async def test_the_observer_sees_each_chunk_before_the_agent() -> None:
    """What was received is on record even where the agent fails on it."""
    seen: list[tuple[str, str, int]] = []

    def fail(_: tokens_pb2.Tokens) -> None:
        raise KeyError("agent")

    def observer(rollout_id: str, turn_id: str, chunk: pb.TokenChunk) -> None:
        seen.append((rollout_id, turn_id, chunk.offset))

    async with rollout_on(Gateway(), observer=observer) as rollout:
        with pytest.raises(KeyError):
            await rollout.generate(token_ids=[1], turn_id="t", on_tokens=fail)
    assert seen == [("r", "t", 0)]


async def test_the_token_log_holds_every_chunk_once(tmp_path: Path) -> None:
    """One JSON line per chunk, over a broken stream and from two logs on one file."""
    path = tmp_path / "tokens.jsonl"
    with TokenLog(path) as first, TokenLog(path) as second:
        for log in (first, second):
            async with rollout_on(Gateway([4]), observer=log.write) as rollout:
                await rollout.generate(token_ids=[1], turn_id="t")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [token for line in lines for token in line["token_ids"]] == TOKENS * 2
    assert lines[0] == {
        "rollout_id": "r",
        "turn_id": "t",
        "offset": 0,
        "token_ids": TOKENS[:2],
        "logprobs": [-3.5, -4.0],
        "spans": [[0, 2, 1, "server-1"]],
    }
