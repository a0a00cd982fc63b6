"""BeginTurns: rollouts and turns of many callers in one message, independently."""

from __future__ import annotations

import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from bench.harness.store_calls import send_async
from services.lib.token_bytes import pack_ids
from tests.lib.trajectory_manager.client import CREDENTIAL, Client
from trajectory_manager.api import begin_turns
from trajectory_manager.service.rollouts import Rollouts

NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
INTERNAL = grpc.StatusCode.INTERNAL.value[0]


def start(client: Client, rollout_id: str, lease_token: str = "") -> pb.NewRollout:
    """What opens a rollout, EVAL unless leased."""
    return pb.NewRollout(
        run_id=client.run_id,
        rollout_id=rollout_id,
        lease_token=lease_token,
        purpose=tokens_pb2.PURPOSE_TRAIN if lease_token else tokens_pb2.PURPOSE_EVAL,
        credential_digest=CREDENTIAL,
    )


def begin(client: Client, rollout_id: str, turn_id: str = "t") -> pb.NewTurn:
    """What opens a turn."""
    return pb.NewTurn(
        run_id=client.run_id,
        rollout_id=rollout_id,
        turn_id=turn_id,
        attempt_id="a",
        token_ids=pack_ids([1, 2, 3]),
        credential_digest=CREDENTIAL,
    )


async def opened(client: Client, *names: str) -> None:
    """Open rollouts, all at once."""
    request = pb.BeginTurnsRequest(rollouts=[start(client, name) for name in names])
    answer = await client.trajectories.BeginTurns(request)
    assert not any(result.HasField("error") for result in answer.rollouts)


async def test_parts_succeed_or_fail_independently(replicas: tuple[Client, Client]) -> None:
    """In the order asked; another replica knows what was opened."""
    first, second = replicas
    await first.submit("a")
    lease = await first.lease()
    await opened(first, "one", "two")
    request = pb.BeginTurnsRequest(
        rollouts=[
            start(first, lease.rollout_id, lease.lease_token),
            start(first, "a/0/7", "a/0/7 nonsense"),
        ],
        turns=[begin(first, "one"), begin(first, "nobody"), begin(first, "two")],
    )
    answer = await first.trajectories.BeginTurns(request)
    assert [result.HasField("error") for result in answer.rollouts] == [False, True]
    assert answer.rollouts[0].started.group_id == "a"
    assert [result.error.code for result in answer.turns] == [0, NOT_FOUND, 0]
    alone = await send_async(second.trajectories, begin(second, "one"))
    assert alone == answer.turns[0].begun


async def test_a_message_has_a_bounded_number_of_parts(replicas: tuple[Client, Client]) -> None:
    """By its name and number."""
    client, _ = replicas
    for name in ("rollouts", "turns"):
        request = pb.BeginTurnsRequest()
        for _ in range(1025):
            getattr(request, name).add()
        with pytest.raises(grpc.aio.AioRpcError, match=f"{name} is 1025") as caught:
            await client.trajectories.BeginTurns(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_part_that_exceeds_the_response_size_is_retried(
    replicas: tuple[Client, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn is open all the same: asked alone, the same attempt is answered."""
    client, _ = replicas
    await opened(client, "one", "two")
    monkeypatch.setattr(begin_turns, "_MAX_RESPONSE_BYTES", 1)
    request = pb.BeginTurnsRequest(turns=[begin(client, "one"), begin(client, "two")])
    answer = await client.trajectories.BeginTurns(request)
    assert [result.error.code for result in answer.turns] == [0, EXHAUSTED]
    again = await client.trajectories.BeginTurns(pb.BeginTurnsRequest(turns=[begin(client, "two")]))
    assert again.turns[0].WhichOneof("result") == "begun"


async def test_a_bug_in_one_part_is_not_the_others_failure(
    replicas: tuple[Client, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that meets it learns nothing of it but its kind."""
    client, _ = replicas
    await opened(client, "one", "two")
    real = Rollouts.begin_turn

    async def breaks(self: Rollouts, new: pb.NewTurn) -> pb.BegunTurn:
        if new.rollout_id == "one":
            raise KeyError("a secret")
        return await real(self, new)

    monkeypatch.setattr(Rollouts, "begin_turn", breaks)
    request = pb.BeginTurnsRequest(turns=[begin(client, "one"), begin(client, "two")])
    one, two = (await client.trajectories.BeginTurns(request)).turns
    assert (one.error.code, two.error.code) == (INTERNAL, 0)
    assert "secret" not in one.error.message
