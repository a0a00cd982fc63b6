"""Log-probs of turns at different temperatures, from the engine to the trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import torch
from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_pb2
from transformers import Qwen3ForCausalLM

from rollout.server.cli import build
from rollout.server.config import RolloutServerConfig
from services.chassis.rpc.server import started
from services.lib.token_bytes import unpack_ids
from tests.lib.rollout.gateway.support import bearer, gateway
from tests.lib.rollout.server.support import recompute
from tests.lib.trainer.support import make_model
from tests.lib.trajectory_manager.client import Client
from tests.lib.trajectory_manager.memory.store import memory_store
from trainer.data.advantages import SequenceAdvantages
from trainer.data.micro_batch import plan_micro_batches
from trainer.data.token_sequence import sequence
from trainer.policy.forward import forward
from trajectory_manager.cli import service as manager_service
from trajectory_manager.config import TrajectoryManagerConfig
from trajectory_manager.store.redis.connect import Store

COLD, WARM = 0.4, 1.0
PRECISION = 1e-4


class Agent:
    """One rollout of group "g", on the embedded engine."""

    def __init__(self, stub: object, rollout: pb.StartRolloutResponse) -> None:
        self._stub = stub
        self.rollout = rollout

    async def turn(self, turn_id: str, prompt: list[int], temperature: float) -> list[int]:
        """Generate; the whole sequence so far."""
        request = pb.GenerateRequest(
            run_id="run",
            rollout_id=self.rollout.rollout_id,
            turn_id=turn_id,
            token_ids=pb.TokenIds(token_ids=prompt),
            sampling=tokens_pb2.SamplingParams(
                temperature=temperature, max_new_tokens=12, ignore_eos=True
            ),
        )
        ids = list(prompt)
        async for event in self._stub.Generate(  # type: ignore[attr-defined]
            request, metadata=bearer(self.rollout.credential)
        ):
            ids += event.chunk.tokens.token_ids
        return ids

    async def finish(self) -> None:
        """With a reward."""
        rewards = tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="reward", value=1.0)])
        request = pb.FinishRolloutRequest(
            run_id="run", rollout_id=self.rollout.rollout_id, rewards=rewards
        )
        await self._stub.FinishRollout(  # type: ignore[attr-defined]
            request, metadata=bearer(self.rollout.credential)
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in float32."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store() -> Store:
    """What the manager keeps."""
    return memory_store()


@pytest.fixture
async def agent(model: Path, store: Store) -> AsyncIterator[Agent]:
    """A server with the embedded engine, a gateway, a manager, and a run."""
    config = RolloutServerConfig(port=0, admin_port=-1, model=model, run_id="run", server_id="s")
    rules = trajectory_pb2.RunConfig(
        group_size=1,
        groups_per_step=1,
        staleness_policy=trajectory_pb2.STALENESS_POLICY_DROP,
        lease_duration=Duration(seconds=60),
        durability=trajectory_pb2.DURABILITY_FAST,
        reward_name="reward",
    )
    async with (
        build(config) as service,
        started(service, config, "rollout_server") as port,
        gateway(model, kept=store, servers=(f"127.0.0.1:{port}",)) as (stub, _, runs),
    ):
        await runs.CreateRun(run_pb.CreateRunRequest(run_id="run", config=rules))
        request = pb.StartRolloutRequest(
            run_id="run",
            rollout_id="mine",
            purpose=tokens_pb2.PURPOSE_TRAIN,
            group=pb.Group(group_id="g", size=1),
        )
        yield Agent(stub, await stub.StartRollout(request))


async def test_recorded_and_trained_log_probs_are_those_of_each_turns_temperature(
    agent: Agent, store: Store, model: Path
) -> None:
    """Turns at 0.4 and at 1.0 of one rollout: one sample, and transformers' values to 1e-4."""
    first = await agent.turn("t1", [3, 4, 5], COLD)
    second = await agent.turn("t2", [*first, 6, 7], WARM)
    await agent.finish()
    (sample,) = await leased(store)
    assert unpack_ids(sample.tokens.token_ids) == second
    item = sequence(sample)
    sampled = [*range(3, len(first)), *range(len(first) + 2, len(second))]
    assert item.loss_mask_T.nonzero()[0].tolist() == sampled
    cold = recompute(model, second[:3], first[3:], COLD)
    warm = recompute(model, second[: len(first) + 2], second[len(first) + 2 :], WARM)
    expected = torch.cat([cold, warm]).numpy()
    np.testing.assert_allclose(item.behaviour_logprobs_T[sampled], expected, atol=PRECISION)
    trained = trained_logprobs(model, sample)
    np.testing.assert_allclose(trained[sampled], expected, atol=PRECISION)


async def test_the_temperature_of_the_last_turn_would_be_wrong_for_the_first(
    agent: Agent, store: Store, model: Path
) -> None:
    """Negative control: with one temperature for the sample, the first turn is off-policy."""
    first = await agent.turn("t1", [3, 4, 5], COLD)
    await agent.turn("t2", [*first, 6, 7], WARM)
    await agent.finish()
    (sample,) = await leased(store)
    for turn in sample.turns:
        turn.sampling.temperature = WARM
    recorded = sequence(sample).behaviour_logprobs_T[3 : len(first)]
    trained = trained_logprobs(model, sample)[3 : len(first)]
    assert np.abs(trained - recorded).max() > 0.05


async def test_a_turn_repeated_under_another_temperature_is_refused(
    agent: Agent, store: Store
) -> None:
    """It would continue tokens of one distribution with those of another."""
    first = await agent.turn("t1", [3, 4, 5], WARM)
    with pytest.raises(grpc.aio.AioRpcError, match="sampling") as caught:
        await agent.turn("t1", [3, 4, 5], 0.2)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert await agent.turn("t1", [3, 4, 5], WARM) == first


async def test_greedy_sampling_of_a_rollout_to_train_is_refused(agent: Agent) -> None:
    """At the door, not by the trainer's end: at temperature 0 log-probs mean nothing."""
    with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.temperature is 0") as caught:
        await agent.turn("t1", [3, 4, 5], 0.0)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def leased(store: Store) -> list[trajectory_pb2.Sample]:
    """The samples of step 1, from another replica of the manager."""
    config = TrajectoryManagerConfig(redis_url="redis://oracle", admin_port=-1, drain_seconds=0.0)
    async with (
        started(manager_service(config, store), config) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        client = Client(channel, "run")
        return list((await client.lease_samples(await client.reconcile(), 1, wait=10)).samples)


def trained_logprobs(model: Path, sample: trajectory_pb2.Sample) -> np.ndarray:
    """What the trainer computes for each token, under the weights that sampled it."""
    item = sequence(sample)
    ones = np.ones(1)
    advantages = SequenceAdvantages(
        advantages_N=ones,
        weights_N=ones,
        turn_rewards_N=[()],
        bootstrap_N=np.zeros(1, bool),
        denominator=1.0,
    )
    ((batch,),) = plan_micro_batches([item], advantages, num_ranks=1, micro_batch_tokens=64)
    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        found = forward(network, batch, "cpu", packed=False).logprobs_BT[0]
    return np.append(0.0, found.numpy())
