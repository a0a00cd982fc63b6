"""Sampling, parents, labels and rewards of turns, from begin to sample, over real gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.common.v1.tokens_pb2 import Reward, Rewards, SamplingParams
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from bench.harness.store_calls import send_async
from services.lib.token_bytes import unpack_ids
from tests.lib.trajectory_manager.client import CREDENTIAL, RULES, Client, message

POLICY = tokens_pb2.ORIGIN_POLICY
COOL, WARM = SamplingParams(temperature=0.4), SamplingParams(temperature=1.0, top_k=5)


async def turn(
    client: Client,
    rollout_id: str,
    turn_id: str,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampling: SamplingParams | None = None,
) -> None:
    """A whole turn."""
    begun = await client.begin(rollout_id, turn_id, prompt, sampling=sampling)
    new = prompt[len(begun.prefix_token_ids) // 4 :]
    if new:
        await client.append(rollout_id, turn_id, begun.epoch, 0, message(new))
    await client.append(rollout_id, turn_id, begun.epoch, len(new), message(answer, POLICY))
    await client.end(rollout_id, turn_id, begun.epoch)


async def leased(client: Client) -> str:
    """A leased rollout that has started."""
    lease = await client.lease()
    await client.start(lease.rollout_id, lease.lease_token)
    return lease.rollout_id


async def finish(client: Client, rollout_id: str, **outcome: Any) -> None:
    """Finish a rollout with this outcome."""
    given = {"rewards": Rewards(rewards=[Reward(name="reward", value=1.0)]), **outcome}
    request = pb.RolloutFinish(
        run_id=client.run_id, rollout_id=rollout_id, credential_digest=CREDENTIAL, **given
    )
    await send_async(client.trajectories, request)


async def samples(client: Client) -> list[trajectory_pb2.Sample]:
    """The samples of the next step."""
    epoch = await client.reconcile()
    return list((await client.lease_samples(epoch, 1, wait=5)).samples)


async def test_each_turn_has_its_own_sampling(replicas: tuple[Client, Client]) -> None:
    """At temperatures 0.4 and 1.0 in one rollout; defaults are left out, and parts cover it."""
    client, other = replicas
    await client.submit("a")
    name = await leased(client)
    await turn(client, name, "t1", [1, 2], [3], COOL)
    await turn(client, name, "t2", [1, 2, 3, 4], [5, 6], WARM)
    await finish(client, name)
    await client.play()
    stored = await other.get(name)
    expected = [SamplingParams(temperature=0.4), SamplingParams(top_k=5)]
    assert [each.sampling for each in stored.turns] == expected
    sample = next(each for each in await samples(other) if each.rollout_id == name)
    assert [each.sampling for each in sample.turns] == expected
    assert [(each.turn_id, each.num_tokens) for each in sample.turns] == [("t1", 3), ("t2", 3)]
    assert list(unpack_ids(sample.tokens.token_ids)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"sampling": WARM}, "sampling"),
        ({"sampling": None}, "sampling"),
        ({"prompt": [1, 3]}, "prompt"),
    ],
)
async def test_a_repeated_turn_is_the_same_turn(
    replicas: tuple[Client, Client], change: dict[str, Any], differs: str
) -> None:
    """What differs is named, and the writer is not fenced; a default given or not is the same."""
    first, second = replicas
    await first.start("r")
    given: dict[str, Any] = {"prompt": [1, 2], "sampling": COOL}
    begun = await first.begin("r", "t", **given)
    with pytest.raises(grpc.aio.AioRpcError, match=differs) as caught:
        await second.begin("r", "t", **{**given, **change}, attempt_id="b")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert await first.append("r", "t", begun.epoch, 0, message([1, 2])) == 2
    same = SamplingParams(temperature=0.4, top_p=1.0, top_k=0, max_new_tokens=256, min_p=0.0)
    again = await second.begin("r", "t", [1, 2], sampling=same)
    assert again.epoch == begun.epoch


async def test_another_template_is_another_turn(replicas: tuple[Client, Client]) -> None:
    """The fingerprint is part of the turn's key."""
    client, _ = replicas
    await client.start("r")
    request = pb.NewTurn(
        run_id=client.run_id,
        rollout_id="r",
        turn_id="t",
        attempt_id="a",
        message_keys=pb.MessageKeys(keys=["user"]),
        template_fingerprint="one",
        credential_digest=CREDENTIAL,
    )
    await send_async(client.trajectories, request)
    request.template_fingerprint = "two"
    with pytest.raises(grpc.aio.AioRpcError, match="template_fingerprint") as caught:
        await send_async(client.trajectories, request)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_training_is_never_greedy(replicas: tuple[Client, Client]) -> None:
    """Temperature 0 is refused before the turn begins; EVAL may use it."""
    client, _ = replicas
    await client.submit("a")
    name = await leased(client)
    greedy = SamplingParams(temperature=0.0)
    with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.temperature") as caught:
        await client.begin(name, "t", [1], sampling=greedy)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not (await client.get(name)).turns
    await client.start("r")
    assert (await client.begin("r", "t", [1], sampling=greedy)).epoch


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_p": 1.5}, "min_p"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
    ],
)
async def test_wrong_sampling_is_named(
    replicas: tuple[Client, Client], params: dict[str, Any], field: str
) -> None:
    """By its field."""
    client, _ = replicas
    await client.start("r")
    with pytest.raises(grpc.aio.AioRpcError, match=f"sampling.{field}") as caught:
        await client.begin("r", "t", [1], sampling=SamplingParams(**params))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_all_sampling_parameters_come_back(replicas: tuple[Client, Client]) -> None:
    """Those that are not at their default, whatever the order of stops."""
    client, _ = replicas
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=4,
        max_new_tokens=17,
        stop_token_ids=[1, 5],
        seed=0,
        ignore_eos=True,
        min_p=0.25,
        stop=["a", "b"],
    )
    assert len(params.ListFields()) == len(SamplingParams.DESCRIPTOR.fields)
    await client.start("r")
    await client.begin("r", "t", [1], sampling=params)
    assert (await client.get("r")).turns[0].sampling == params
    del params.stop[:]
    params.stop.extend(["b", "a", "a"])
    await client.begin("r", "t", [1], sampling=params)


async def test_labels_of_a_rollout_are_returned(replicas: tuple[Client, Client]) -> None:
    """And bounded."""
    client, _ = replicas
    request = pb.NewRollout(
        run_id=client.run_id,
        rollout_id="r",
        purpose=tokens_pb2.PURPOSE_EVAL,
        credential_digest=CREDENTIAL,
        labels={"suite": "math", "é": ""},
    )
    await send_async(client.trajectories, request)
    assert dict((await client.get("r")).labels) == {"suite": "math", "é": ""}
    request.labels["x" * 64] = "y"
    with pytest.raises(grpc.aio.AioRpcError, match="labels"):
        await send_async(client.trajectories, request)


async def test_rewards_of_turns_are_with_their_turns(replicas: tuple[Client, Client]) -> None:
    """Of a fork each sample has the rewards of the turns it has whole, and the rollout's."""
    client, _ = replicas
    await client.submit("a")
    name = await leased(client)
    await turn(client, name, "root", [1], [2])
    await turn(client, name, "left", [1, 2, 3], [4])
    await turn(client, name, "right", [1, 2, 3], [5])
    await finish(
        client,
        name,
        rewards=Rewards(
            rewards=[
                Reward(name="reward", value=1.0),
                Reward(name="reward", value=0.1, turn_id="root"),
                Reward(name="reward", value=0.2, turn_id="left"),
                Reward(name="reward", value=0.3, turn_id="right"),
            ]
        ),
    )
    await client.play()
    found = [sample for sample in await samples(client) if sample.rollout_id == name]
    by_turn = [
        {each.turn_id: [reward.value for reward in each.rewards] for each in sample.turns}
        for sample in found
    ]
    assert by_turn == [{"root": [0.1], "left": [0.2]}, {"root": [0.1], "left": [], "right": [0.3]}]
    assert [[reward.value for reward in sample.rewards] for sample in found] == [[1.0], [1.0]]


async def test_an_untrained_branch_is_in_no_sample(replicas: tuple[Client, Client]) -> None:
    """What it shares is trained elsewhere; without the mark it is a sample."""
    client, _ = replicas
    await client.submit("a")
    for untrained in (["left"], []):
        name = await leased(client)
        await turn(client, name, "root", [1], [2])
        await turn(client, name, "left", [1, 2, 3], [4])
        await turn(client, name, "right", [1, 2, 9], [5])
        await finish(client, name, untrained_turn_ids=untrained)
        assert (await client.get(name)).untrained_turn_ids == untrained
    found = await samples(client)
    assert [sample.sample_id for sample in found] == ["a/0/1#right", "a/1/1#left", "a/1/1#right"]
    assert found[0].loss_mask == bytes([0, 1, 0, 1])


async def test_an_untrained_turn_in_the_middle_is_masked(replicas: tuple[Client, Client]) -> None:
    """Its tokens stay in the sample: later turns were sampled after them."""
    client, _ = replicas
    await client.submit("a")
    name = await leased(client)
    await turn(client, name, "t1", [1], [2])
    await turn(client, name, "t2", [1, 2, 3], [4])
    await finish(client, name, untrained_turn_ids=["t1"])
    await client.play()
    (sample,) = [sample for sample in await samples(client) if sample.rollout_id == name]
    assert list(unpack_ids(sample.tokens.token_ids)) == [1, 2, 3, 4]
    assert sample.loss_mask == bytes([0, 0, 0, 1])


UNKNOWN = Rewards(
    rewards=[Reward(name="reward", value=1.0), Reward(name="reward", value=1.0, turn_id="t9")]
)
TWICE = Rewards(rewards=[Reward(name="reward", value=1.0, turn_id="t")] * 2)
OTHER = Rewards(rewards=[Reward(name="other", value=1.0)])
BY_POLICY = tokens_pb2.Failure(failure_class=tokens_pb2.FAILURE_CLASS_POLICY)


@pytest.mark.parametrize(
    ("outcome", "wrong"),
    [
        ({"rewards": UNKNOWN}, r"rewards\.rewards\[1\]\.turn_id is 't9'"),
        ({"rewards": TWICE}, r"rewards\.rewards is .*each name once per turn"),
        ({"untrained_turn_ids": ["t", "t8"]}, r"untrained_turn_ids\[1\] is 't8'"),
        ({"rewards": Rewards()}, r"rewards\.rewards is \[\]"),
        ({"rewards": OTHER}, r"rewards\.rewards is \['other'\].*'reward', the run's reward_name"),
        ({"failure": BY_POLICY, "rewards": None}, r"failure\.failure_class is 1.*policy_failure"),
    ],
)
async def test_wrong_outcomes_are_named(
    replicas: tuple[Client, Client], outcome: dict[str, Any], wrong: str
) -> None:
    """The rollout goes on: it finishes with a right one. A failure needs no reward."""
    client = Client(replicas[0].channel, f"{replicas[0].run_id}-named")
    rules = trajectory_pb2.RunConfig()
    rules.CopyFrom(RULES)
    rules.reward_name = "reward"
    await client.create_run(rules)
    await client.submit("a")
    name = await leased(client)
    await turn(client, name, "t", [1], [2])
    with pytest.raises(grpc.aio.AioRpcError, match=wrong) as caught:
        await finish(client, name, **outcome)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    rewards = Rewards(rewards=[Reward(name="reward", value=1.0, turn_id="t")])
    for _ in range(2):
        await finish(client, name, rewards=rewards, untrained_turn_ids=["t"])
    assert (await client.get(name)).rewards == rewards


async def test_without_a_reward_name_any_reward_will_do(replicas: tuple[Client, Client]) -> None:
    """Negative control; an EVAL rollout needs none at all."""
    client, _ = replicas
    await client.submit("a")
    name = await leased(client)
    await turn(client, name, "t", [1], [2])
    await finish(client, name, rewards=OTHER)
    await client.start("r")
    await finish(client, "r", rewards=None)
    stored = await client.get("r")
    assert stored.state == trajectory_pb2.ROLLOUT_STATE_FINISHED
    assert stored.WhichOneof("outcome") == "rewards"


async def test_a_policy_failure_is_returned_with_its_rewards(
    replicas: tuple[Client, Client],
) -> None:
    """Another failure is returned as one."""
    client, _ = replicas
    await client.start("r")
    await client.fail("r")
    stored = await client.get("r")
    assert stored.rewards.policy_failure == "it said nothing"
    assert stored.rewards.rewards[0].value == 0.0
    await client.start("s")
    failure = tokens_pb2.Failure(failure_class=tokens_pb2.FAILURE_CLASS_TIMEOUT, message="slow")
    await finish(client, "s", failure=failure, rewards=None)
    assert (await client.get("s")).failure == failure
