"""One episode: the policy and the environment in turn, or the environment by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from seamflow.client import Rollout, Turn
from seamflow.client.messages import Message
from seamflow.client.turn import Task
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import Endpoint, EnvironmentClient, OpenEpisode, Step
from seamflow.errors import InvalidRequestError

from services.environments.config import EnvironmentsConfig


@dataclass(slots=True)
class Outcome:
    """The rewards of an episode."""

    rewards: dict[str, float] = field(default_factory=dict)
    """Of the rollout, by name."""
    turn_rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of its turns, by turn_id and name."""
    policy_failure: str = ""
    """What the policy did wrong, where that ended it."""
    truncated: bool = False
    """Whether a limit cut it off."""
    messages: list[Message] = field(default_factory=list)
    """The conversation, up to the last answer of the policy; empty: only the environment has it."""

    def add(self, turn_id: str, step: Step, *, per_turn: bool) -> None:
        """Count the rewards of a step for the rollout, or for its turn."""
        given = step.rewards if isinstance(step.rewards, Mapping) else {"reward": step.rewards}
        if per_turn:
            self.turn_rewards[turn_id] = dict(given)
        for name, value in given.items():
            before = self.rewards.get(name, 0.0)
            self.rewards[name] = before if per_turn else before + value
        self.policy_failure = step.policy_failure
        self.truncated = step.truncated

    def add_of_server(self, rewards: Mapping[str, float], address: str) -> None:
        """Add the rewards of the reward server at `address`.

        Raises:
            ValueError: a reward has a name that the environment's have too.
        """
        for name, value in rewards.items():
            if name in self.rewards:
                raise ValueError(
                    f"reward {name!r} is given by the environment and by reward_server {address}: "
                    "rename one of them, or let the environment give no rewards: Step(rewards={})"
                )
            self.rewards[name] = value


async def run_stepped(
    config: EnvironmentsConfig, client: EnvironmentClient, task: Task, rollout: Rollout
) -> Outcome:
    """Reset, then turns of the policy and steps of the environment until the episode ends."""
    seed = _seed(config, task, rollout)
    async with await client.reset(task, seed, timeout=config.reset_timeout_seconds) as episode:
        return await _turns(config, episode, rollout)


async def run_self_driving(
    config: EnvironmentsConfig, client: EnvironmentClient, task: Task, rollout: Rollout
) -> Outcome:
    """Let the environment call the policy with the rollout's credential."""
    url = config.http_gateway_url.rstrip("/")
    base_url = f"{url}/rollouts/{quote(rollout.rollout_id, safe='')}" if url else ""
    endpoint = Endpoint(
        base_url=f"{base_url}/v1" if url else "",
        anthropic_base_url=base_url,
        rollout_gateway=config.rollout_gateway,
        run_id=config.run_id,
        rollout_id=rollout.rollout_id,
        credential=rollout.credential,
    )
    seed = _seed(config, task, rollout)
    found = await client.run_episode(task, endpoint, seed)
    outcome = Outcome(policy_failure=found.policy_failure)
    for reward in found.rewards:
        of_turn = outcome.turn_rewards.setdefault(reward.turn_id, {}) if reward.turn_id else None
        (outcome.rewards if of_turn is None else of_turn)[reward.name] = reward.value
    return outcome


async def _turns(config: EnvironmentsConfig, episode: OpenEpisode, rollout: Rollout) -> Outcome:
    outcome = Outcome(messages=list(episode.observation.messages))
    for index in range(config.max_turns):
        try:
            turn = await _turn(config, episode, rollout, outcome.messages)
        except InvalidRequestError as error:
            if error.reason == "CONTEXT_LENGTH_EXCEEDED" and index > 0:
                outcome.policy_failure, outcome.truncated = str(error), True
                break  # what it has reached counts
            raise
        outcome.messages.append(turn.message)
        step = await episode.step(turn.message, timeout=config.step_timeout_seconds)
        outcome.add(turn.turn_id, step, per_turn=config.reward_per_turn)
        if step.done or step.truncated:
            break
        assert not isinstance(step.messages, str)  # the client gives messages
        outcome.messages += step.messages
    else:
        outcome.truncated = True  # max_turns
    return outcome


async def _turn(
    config: EnvironmentsConfig, episode: OpenEpisode, rollout: Rollout, messages: list[Any]
) -> Turn:
    sampling = tokens_pb2.SamplingParams(
        temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens
    )
    tools = episode.observation.tools or ()
    return await rollout.generate(
        messages, sampling, tools=tools, timeout=config.episode_timeout_seconds
    )


def _seed(config: EnvironmentsConfig, task: Task, rollout: Rollout) -> int:
    return episode_seed(
        config.seed, task.task_id, rollout.rollout_id, per_task=config.seed_per_task
    )


def episode_seed(seed: int, task_id: str, rollout_id: str, *, per_task: bool = False) -> int:
    """A seed in [0, 2^32), as numpy's global one takes; equal for equal arguments, everywhere.

    Leased rollouts are named "<task>/<place in the group>/<attempt>": a replacement gets the seed
    of the rollout that it replaces.
    """
    place = "" if per_task else rollout_id.rpartition("/")[0]
    text = "\0".join((str(seed), task_id, place))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
