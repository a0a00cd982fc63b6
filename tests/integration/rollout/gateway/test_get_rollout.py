"""GetRollout: the recorded turns and rewards of a rollout, given its credential."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2

from tests.integration.rollout.gateway.test_gateway import PROMPT, agent, ids_of
from tests.lib.rollout.gateway.support import ScriptedServer, bearer, scripted

STOP = tokens_pb2.FINISH_REASON_STOP
RUNNING = trajectory_pb2.ROLLOUT_STATE_RUNNING
FINISHED = trajectory_pb2.ROLLOUT_STATE_FINISHED
REWARD = tokens_pb2.Reward(name="reward", value=0.5)


async def test_a_rollout_is_returned_as_recorded(tmp_path: Path) -> None:
    """Turns with tokens, parent and shared prefix; rewards and the end once it is finished."""
    server = ScriptedServer()
    server.answers = [[[7]], [[8, 9]]]
    async with scripted(server) as address, agent(tmp_path, address) as one:
        ask = pb.GetRolloutRequest(run_id="run", rollout_id="r")
        shown = bearer(one.credential)
        await ids_of(one.generate("t1"))
        request = one.request("t2")
        request.token_ids.token_ids.extend([7, 6])
        await ids_of(one.call(request))
        running = (await one.stub.GetRollout(ask, metadata=shown)).trajectory
        assert (running.state, running.WhichOneof("outcome")) == (RUNNING, None)
        first, second = running.turns
        assert (first.turn_id, first.prefix_turn_id, first.prefix_length) == ("t1", "", 0)
        assert list(first.tokens.token_ids) == [*PROMPT, 7]
        assert (second.turn_id, second.prefix_turn_id, second.prefix_length) == ("t2", "t1", 4)
        assert list(second.tokens.token_ids) == [6, 8, 9]
        assert (first.finish_reason, second.finish_reason) == (STOP, STOP)
        await one.stub.FinishRollout(
            pb.FinishRolloutRequest(
                run_id="run", rollout_id="r", rewards=tokens_pb2.Rewards(rewards=[REWARD])
            ),
            metadata=shown,
        )
        finished = (await one.stub.GetRollout(ask, metadata=shown)).trajectory
        assert (finished.state, list(finished.rewards.rewards)) == (FINISHED, [REWARD])
        assert finished.turns == running.turns


@pytest.mark.parametrize(
    ("rollout_id", "credential", "code"),
    [
        ("r", "wrong", grpc.StatusCode.PERMISSION_DENIED),
        ("other", None, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_a_rollout_is_returned_only_for_its_credential(
    tmp_path: Path, rollout_id: str, credential: str | None, code: grpc.StatusCode
) -> None:
    """A wrong credential and an unknown rollout are errors with their own codes."""
    async with agent(tmp_path) as one:
        request = pb.GetRolloutRequest(run_id="run", rollout_id=rollout_id)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.stub.GetRollout(request, metadata=bearer(credential or one.credential))
        assert caught.value.code() is code
