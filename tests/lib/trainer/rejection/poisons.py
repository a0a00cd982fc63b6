"""Groups that no trainer survives, recorded through the import path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

Group = Callable[[str], pb.RecordedGroup]


def group(
    task_id: str,
    *,
    sampled: Sequence[int] = (3, 4),
    logprob: float = -0.5,
    temperature: float = 1.0,
    rewards: Sequence[Sequence[tuple[str, float]]] = ((("reward", 0.0),), (("reward", 1.0),)),
) -> pb.RecordedGroup:
    """A group of two rollouts of one turn, whose rewards differ."""
    ids = [1, 2, *sampled]
    spans = [
        tokens_pb2.Span(start=0, num_tokens=2, origin=tokens_pb2.ORIGIN_ENVIRONMENT),
        tokens_pb2.Span(
            start=2,
            num_tokens=len(sampled),
            origin=tokens_pb2.ORIGIN_POLICY,
            version_source=tokens_pb2.VERSION_SOURCE_ENGINE,
            server_id="server-1",
        ),
    ]
    turn = trajectory_pb2.Turn(
        turn_id="t",
        tokens=tokens_pb2.Tokens(
            token_ids=ids, logprobs=[0.0, 0.0, *(logprob for _ in sampled)], spans=spans
        ),
        finish_reason=tokens_pb2.FINISH_REASON_STOP,
        sampling=tokens_pb2.SamplingParams(temperature=temperature),
    )
    return pb.RecordedGroup(
        task_id=task_id,
        rollouts=[
            pb.RecordedRollout(turns=[turn], rewards=tokens_pb2.Rewards(rewards=map(_reward, each)))
            for each in rewards
        ],
    )


def _reward(named: tuple[str, float]) -> tokens_pb2.Reward:
    name, _, turn_id = named[0].partition("@")
    return tokens_pb2.Reward(name=name, value=named[1], turn_id=turn_id)


def record(run_id: str, *groups: pb.RecordedGroup) -> pb.RecordGroupsRequest:
    """The request."""
    return pb.RecordGroupsRequest(run_id=run_id, groups=groups)


GOOD: Group = group
POISONS: dict[str, tuple[Group, str]] = {
    "greedy": (lambda name: group(name, temperature=0.0), "temperature"),
    "cold": (lambda name: group(name, temperature=1e-30), "temperature"),
    "vocabulary": (lambda name: group(name, sampled=[3, 1_000_000]), "token id 1000000"),
    "reward name": (
        lambda name: group(name, rewards=[[("score", 0.0)], [("score", 1.0)]]),
        "has no reward 'reward'",
    ),
    "reward": (
        lambda name: group(name, rewards=[[("reward", 0.0)], [("reward", 1e308)]]),
        "1e\\+308",
    ),
    "beyond float32": (
        lambda name: group(name, rewards=[[("reward", 1e39)], [("reward", -1e200)]]),
        "1e\\+39",
    ),
    "rewards that add up": (
        lambda name: group(
            name, rewards=[[("reward", 0.0)], [("reward", 1.5e308), ("reward@t", 1.5e308)]]
        ),
        "inf",
    ),
    "impossible log-prob": (lambda name: group(name, logprob=-1e30), "log-prob -1.0"),
    "positive log-prob": (lambda name: group(name, logprob=3.0), "log-prob 3.0"),
    "no log-prob": (lambda name: group(name, logprob=float("nan")), "log-prob nan"),
}
"""By name: the group, and what the reason of its dead letter says."""
