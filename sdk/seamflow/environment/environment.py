"""The interfaces of environments and reward functions, which users implement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from seamflow.client.messages import Message, Tool
from seamflow.client.turn import Task
from seamflow.common.v1 import tokens_pb2

Rewards = Mapping[str, float] | float
"""One reward, or several named ones; a number alone is named "reward"."""

RewardFunction = Callable[[Task, Sequence[Message]], Rewards | Awaitable[Rewards]]
"""Scores (task, transcript), the transcript being all messages of the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an episode starts with."""

    messages: Sequence[Message]
    """First messages of the conversation; at least one."""
    tools: Sequence[Tool] | None = None
    """Tools of this episode; None: those of the environment."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON object for people and records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the environment answers to a message of the policy."""

    messages: str | Sequence[Message] = ()
    """Answers of tools and user messages; a text is one user message."""
    rewards: Rewards = 0.0
    """Rewards of this step, finite; they add up over the episode."""
    done: bool = False
    """Whether the episode has ended by its own rules."""
    truncated: bool = False
    """Whether it was cut off by a limit; the rewards count."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON object for people and records."""
    policy_failure: str = ""
    """What the policy did wrong, where that ended the episode; the rewards count."""


class SteppedEnvironment(Protocol):
    """An environment that answers message by message: one object for each episode.

    Methods may be `async`; others run in a thread of the episode's own. An exception means that the
    environment failed: the rollout is replaced, never scored.

    Optional attributes of the class: `tools`, `tasks` (payloads, or `Task`s), `max_episodes`,
    `is_seeded`, and a method `close()`, called when the episode has ended.
    """

    def reset(self, task: Task, seed: int) -> str | Sequence[Message] | Observation:
        """Start the episode. A text is one user message. Equal arguments start equal episodes."""
        ...

    def step(self, message: Message) -> Step:
        """Answer a message of the policy, whose tool calls are in `message["tool_calls"]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an episode of a self-driving environment calls the policy."""

    base_url: str
    """For SDKs of OpenAI; empty: no HTTP gateway runs."""
    anthropic_base_url: str
    """For SDKs of Anthropic; empty: no HTTP gateway runs."""
    rollout_gateway: str
    """For `seamflow.Client`."""
    run_id: str
    rollout_id: str
    """Rollout; the caller of the environment finishes it."""
    credential: str = field(repr=False)
    """API key, or credential over gRPC: opens this rollout only."""


class SelfDrivingEnvironment(Protocol):
    """An environment with a loop of its own: one object for each episode."""

    def run(self, task: Task, endpoint: Endpoint, seed: int) -> Rewards:
        """Run the episode with the policy at `endpoint` and return its rewards."""
        ...


class EnvironmentFailed(Exception):  # noqa: N818 -- names the condition
    """Raised by an environment that knows whose fault its failure is."""

    def __init__(
        self,
        message: str,
        failure_class: tokens_pb2.FailureClass.ValueType = (tokens_pb2.FAILURE_CLASS_ENVIRONMENT),
    ) -> None:
        super().__init__(message)
        self.failure_class = failure_class
        """ENVIRONMENT, INFRASTRUCTURE, TIMEOUT or CANCELLED."""


class CapacityReached(Exception):  # noqa: N818 -- names the condition
    """Raised by `reset` and `run` when no further episode fits: the caller waits and repeats."""

    def __init__(self, message: str = "no further episode fits", retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds to wait."""
