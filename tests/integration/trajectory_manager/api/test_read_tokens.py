"""ReadTokens: any window of a turn's whole sequence, as the whole record has it."""

from __future__ import annotations

import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.lib.token_bytes import unpack_ids, unpack_logprobs
from tests.lib.trajectory_manager.client import Client, message

POLICY = tokens_pb2.ORIGIN_POLICY
PROMPT, ANSWER, REPLY, SECOND = [1, 2, 3], [10, 11, 12, 13], [4, 5], [20, 21, 22]
WHOLE = [*PROMPT, *ANSWER, *REPLY, *SECOND]


async def record(client: Client) -> str:
    """A rollout of two turns; the first answer was appended token by token, under two versions."""
    await client.start("r")
    first = await client.begin("r", "t1", PROMPT)
    await client.append("r", "t1", first.epoch, 0, message(PROMPT))
    for place, token in enumerate(ANSWER):
        sampled = message([token], POLICY, version=place // 2)
        await client.append("r", "t1", first.epoch, len(PROMPT) + place, sampled)
    await client.end("r", "t1", first.epoch)
    second = await client.begin("r", "t2", [*PROMPT, *ANSWER, *REPLY])
    await client.append("r", "t2", second.epoch, 0, message(REPLY))
    await client.append("r", "t2", second.epoch, len(REPLY), message(SECOND, POLICY, version=2))
    await client.end("r", "t2", second.epoch)
    return "r"


async def read(
    client: Client, turn_id: str, start: int = 0, num_tokens: int = 0, rollout_id: str = "r"
) -> pb.ReadTokensResponse:
    """A window."""
    request = pb.ReadTokensRequest(
        run_id=client.run_id,
        rollout_id=rollout_id,
        turn_id=turn_id,
        start=start,
        num_tokens=num_tokens,
    )
    return await client.trajectories.ReadTokens(request)


async def test_every_window_is_a_part_of_the_whole_sequence(
    replicas: tuple[Client, Client],
) -> None:
    """Across turns and chunks, with the spans of its tokens; beyond the end there is nothing."""
    client = replicas[0]
    await record(client)
    whole = await read(client, "t2")
    assert list(unpack_ids(whole.tokens.token_ids)) == WHOLE
    assert whole.total == len(WHOLE)
    logprobs = list(unpack_logprobs(whole.tokens.logprobs))
    assert logprobs == [0.0] * 3 + [-0.5] * 4 + [0.0] * 2 + [-0.5] * 3
    versions = [(span.num_tokens, span.weight_version) for span in whole.tokens.spans]
    assert versions == [(3, 0), (2, 0), (2, 1), (2, 0), (3, 2)]
    for start in range(len(WHOLE) + 2):
        for number in (1, 2, 5):
            part = await read(client, "t2", start, number)
            assert list(unpack_ids(part.tokens.token_ids)) == WHOLE[start : start + number]
            assert part.total == len(WHOLE)
            lengths = [span.num_tokens for span in part.tokens.spans]
            assert sum(lengths) == len(WHOLE[start : start + number])
    middle = await read(client, "t2", 4, 2)
    assert [span.weight_version for span in middle.tokens.spans] == [0, 1]
    assert [span.start for span in middle.tokens.spans] == [0, 1]


async def test_a_turn_ends_where_it_ends(replicas: tuple[Client, Client]) -> None:
    """The first turn has no token of the second one."""
    client = replicas[0]
    await record(client)
    first = await read(client, "t1", 5, 100)
    assert (list(unpack_ids(first.tokens.token_ids)), first.total) == (ANSWER[2:], 7)


async def test_headers_alone_say_how_long_turns_are(replicas: tuple[Client, Client]) -> None:
    """GetTrajectory with headers_only has the spans of each turn and no token."""
    client = replicas[0]
    await record(client)
    request = pb.GetTrajectoryRequest(run_id=client.run_id, rollout_id="r", headers_only=True)
    turns = (await client.trajectories.GetTrajectory(request)).trajectory.turns
    assert [sum(s.num_tokens for s in turn.tokens.spans) for turn in turns] == [7, 5]
    assert not any(turn.tokens.token_ids or turn.tokens.logprobs for turn in turns)
    assert (await client.get("r")).turns[0].tokens.token_ids == [*PROMPT, *ANSWER]


async def test_a_rollout_comes_with_its_task(replicas: tuple[Client, Client]) -> None:
    """As it was submitted, before anything is recorded; control: only where it is asked for."""
    client = replicas[0]
    await client.submit("one")
    lease = await client.lease()
    await client.start(lease.rollout_id, lease.lease_token)
    request = pb.GetTrajectoryRequest(run_id=client.run_id, rollout_id=lease.rollout_id)
    assert not (await client.trajectories.GetTrajectory(request)).HasField("task")
    request.with_task = True
    assert (await client.trajectories.GetTrajectory(request)).task == lease.task


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rollout_id": "x"}, "NOT_FOUND"),
        ({"turn_id": "t9"}, "NOT_FOUND"),
        ({"start": -1}, "INVALID_ARGUMENT"),
        ({"num_tokens": -1}, "INVALID_ARGUMENT"),
    ],
)
async def test_what_is_not_there_is_refused(
    replicas: tuple[Client, Client], changes: dict[str, str | int], code: str
) -> None:
    """With the name of the field, or of what is unknown."""
    client = replicas[0]
    await record(client)
    given = {"turn_id": "t2", **changes}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(client, **given)  # type: ignore[arg-type]
    assert caught.value.code().name == code
