"""Environments of verifiers 0.3: their loop calls the policy, their rubric gives the rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import Endpoint, EnvironmentFailed, Task

from adapters.verifiers_classic.reward_errors import reveal, revealed

__all__ = ["VerifiersClassicEnvironment"]

_MODEL = "policy"
_OF_INFRASTRUCTURE = ("ModelError", "InvalidModelResponseError", "InfraError", "TunnelError")
_OF_POLICY = ("EmptyModelResponseError", "OverlongPromptError")


class VerifiersClassicEnvironment:
    """What `load_environment` of a module returns; a task's payload has "index" in its dataset.

    "split" of the payload is "train" (default) or "eval". Rewards: "reward" is that of the rubric;
    each of its functions and metrics stands beside it under its own name.
    """

    max_episodes = 64
    is_seeded = False

    def __init__(
        self,
        env_id: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        max_retries: int = 2,
        num_tasks: int = -1,
    ) -> None:
        """Load the environment.

        Args:
            env_id: Module with `load_environment`; "-" stands for "_".
            kwargs: Keyword arguments of `load_environment`.
            sampling: Such as {"temperature": 1.0, "max_tokens": 512}.
            max_retries: How often a call of the policy is repeated.
            num_tasks: Most tasks of the training dataset; -1: all.

        Raises:
            ValueError: there is no such environment, or it does not load.
        """
        try:
            self._environment = _load(env_id, _Arguments(kwargs or {}))
            number = len(self._environment.get_dataset(n=num_tasks))
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"env_id is {env_id!r}, kwargs {dict(kwargs or {})}: {error}"
            ) from error
        self.name = f"verifiers {env_id}"
        self.tasks = [{"index": index} for index in range(number)]
        self._sampling = dict(sampling or {})
        self._max_retries = max_retries

    async def run(self, task: Task, endpoint: Endpoint, seed: int) -> Mapping[str, float]:
        """Run one episode against the policy. The seed plays no part."""
        if not endpoint.base_url:
            raise EnvironmentFailed(
                "no HTTP gateway runs: start one, and set environments.http_gateway_url",
                tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
            )
        asking = AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.credential,
            max_retries=self._max_retries,
        )
        with revealed() as raised:
            async with asking as client:
                output = await self._environment.run_rollout(
                    self._input(task.payload),
                    vf.OpenAIChatCompletionsClient(client),
                    _MODEL,
                    self._sampling,
                )
        _check(output, raised)
        return _rewards(output)

    def _input(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        is_eval = payload.get("split") == "eval"
        environment = self._environment
        rows = environment.get_eval_dataset() if is_eval else environment.get_dataset()
        index = payload.get("index")
        if not isinstance(index, int) or not 0 <= index < len(rows):
            raise ValueError(f"index of the task is {index!r}: must be 0 to {len(rows) - 1}")
        return dict(rows[index])


class _Arguments:
    """Keyword arguments as the key of a cache."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Arguments) and other.values == self.values

    def __hash__(self) -> int:
        return hash(repr(self.values))


@cache
def _load(env_id: str, arguments: _Arguments) -> Any:
    """One object for all episodes of a process: it is made for that."""
    environment = vf.load_environment(env_id, **arguments.values)
    if environment.rubric.has_group_rewards:
        raise ValueError("its rubric scores groups of rollouts together; here each is scored alone")
    reveal(environment.rubric)
    return environment


def _check(output: Mapping[str, Any], raised: Sequence[str]) -> None:
    """Raise `EnvironmentFailed` for an error of the rollout or of its reward functions, unless the
    policy caused it, with an empty answer or a conversation that became too long."""
    error = output.get("error")
    if error and error["error"] in _OF_POLICY:
        return  # reward functions need not expect a rollout without an answer
    if not error:
        if raised:
            raise EnvironmentFailed("; ".join(raised)[:1000])
        return
    is_infrastructure = error["error"] in _OF_INFRASTRUCTURE or "Sandbox" in error["error"]
    raise EnvironmentFailed(
        f"{error['error']}: {error['error_chain_repr']}"[:1000],
        tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
        if is_infrastructure
        else tokens_pb2.FAILURE_CLASS_ENVIRONMENT,
    )


def _rewards(output: Mapping[str, Any]) -> Mapping[str, float]:
    metrics = {n: float(v) for n, v in output["metrics"].items() if math.isfinite(v)}
    return {**metrics, "reward": float(output["reward"])}
