"""Made-up rollouts on the tiny model's vocabulary: what producers write, and what is recorded.

Members of a group share their prompt; weights change in the middle of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from tests.lib.trainer.support import VOCABULARY

GROUP_SIZE = 2
GROUPS_PER_STEP = 4
TEMPERATURE = 1.0
_MOST_TOKENS = 6
_OLDEST = 3
"""Versions that a recorded token is behind the step it is for, at most."""
_PROBABILITIES = (0.02, 0.3)


def prompt(task_id: str) -> list[int]:
    """Ids of a task's prompt, always the same."""
    random = Random(task_id)
    return _ids(random)


def answer(random: Random, prompt_ids: list[int], versions: tuple[int, int]) -> tokens_pb2.Tokens:
    """A prompt and what was sampled after it, first under the one version, then the other."""
    tokens = tokens_pb2.Tokens()
    _add(tokens, prompt_ids, [0.0] * len(prompt_ids), origin=tokens_pb2.ORIGIN_ENVIRONMENT)
    for version in versions:
        ids = _ids(random)
        logprobs = [math.log(random.uniform(*_PROBABILITIES)) for _ in ids]
        _add(tokens, ids, logprobs, origin=tokens_pb2.ORIGIN_POLICY, version=version)
    return tokens


def reward(random: Random) -> tokens_pb2.Reward:
    """One that differs from those of the other members."""
    return tokens_pb2.Reward(name="reward", value=random.gauss(0.0, 1.0))


def recorded_groups(seed: int, num_steps: int) -> Iterator[pb.RecordedGroup]:
    """The groups of so many steps, in order; step n begins from version n - 1."""
    for number in range(num_steps * GROUPS_PER_STEP):
        task_id = f"group-{number:04d}"
        random = Random(f"{seed}/{task_id}")
        newest = number // GROUPS_PER_STEP
        rollouts = [_recorded(random, task_id, newest) for _ in range(GROUP_SIZE)]
        yield pb.RecordedGroup(task_id=task_id, payload_json="{}", rollouts=rollouts)


def _recorded(random: Random, task_id: str, newest: int) -> pb.RecordedRollout:
    first = max(0, newest - random.randint(1, _OLDEST))
    tokens = answer(random, prompt(task_id), (first, min(first + 1, newest)))
    turn = trajectory_pb2.Turn(
        turn_id="turn",
        tokens=tokens,
        finish_reason=tokens_pb2.FINISH_REASON_STOP,
        sampling=tokens_pb2.SamplingParams(temperature=TEMPERATURE),
    )
    return pb.RecordedRollout(turns=[turn], rewards=tokens_pb2.Rewards(rewards=[reward(random)]))


def _ids(random: Random) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(random.randint(1, _MOST_TOKENS))]


def _add(
    tokens: tokens_pb2.Tokens,
    ids: list[int],
    logprobs: list[float],
    *,
    origin: tokens_pb2.Origin.ValueType,
    version: int = 0,
) -> None:
    sampled = origin == tokens_pb2.ORIGIN_POLICY
    source = tokens_pb2.VERSION_SOURCE_ENGINE if sampled else tokens_pb2.VERSION_SOURCE_UNSPECIFIED
    tokens.spans.add(
        start=len(tokens.token_ids),
        num_tokens=len(ids),
        origin=origin,
        weight_version=version,
        version_source=source,
        server_id="chaos" if sampled else "",
    )
    tokens.token_ids.extend(ids)
    tokens.logprobs.extend(logprobs)
