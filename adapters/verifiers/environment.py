"""Tasksets of verifiers 0.4: their harness calls the policy, their rewards are the rollout's."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import verifiers.v1 as vf
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import Endpoint, EnvironmentFailed, Task
from verifiers.v1.utils.loaders import import_taskset

_MODEL = "policy"


class VerifiersEnvironment:
    """A taskset with a harness, both by module; a task's payload has "index", its place in it.

    Rewards: "reward" is the sum that verifiers trains on; each reward and each metric of the
    taskset stands beside it under its own name.
    """

    max_episodes = 32
    is_seeded = False

    def __init__(
        self,
        taskset: str,
        *,
        harness: str = "adapters.verifiers.chat_harness",
        taskset_config: Mapping[str, Any] | None = None,
        harness_config: Mapping[str, Any] | None = None,
        agent_config: Mapping[str, Any] | None = None,
        runtime: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        num_tasks: int = 1000,
    ) -> None:
        """Load the taskset.

        Args:
            taskset: Id of the taskset: an installed package, or a module.
            harness: Id of the harness; the default one asks once, in this process. "null" and
                "bash" install a program from PyPI at run time.
            taskset_config: Further settings of the taskset.
            harness_config: Further settings of the harness.
            agent_config: Further settings of the agent, such as max_turns.
            runtime: Where the harness runs, such as {"type": "docker"}; default: a subprocess.
            sampling: Such as {"temperature": 1.0, "max_tokens": 512}.
            num_tasks: Most tasks that are read of the taskset.

        Raises:
            ValueError: there is no such taskset or harness, or settings are wrong.
        """
        self.name = f"verifiers {taskset}"
        self._sampling = vf.SamplingConfig(**(sampling or {}))
        try:
            self._config = {
                "taskset": {**(taskset_config or {}), "id": plugin_id(taskset)},
                "agent": {
                    **(agent_config or {}),
                    "harness": {**(harness_config or {}), "id": plugin_id(harness)},
                    "runtime": dict(runtime or {"type": "subprocess"}),
                },
            }
            import_taskset(self._config["taskset"]["id"])
            self._all = _tasks(_Frozen(self._config), num_tasks)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"taskset is {taskset!r}, harness {harness!r}: {error}") from error
        self.tasks = [{"index": index} for index in range(len(self._all))]

    async def run(self, task: Task, endpoint: Endpoint, seed: int) -> Mapping[str, float]:
        """Run one episode against the policy. The seed plays no part."""
        if not endpoint.base_url:
            raise no_gateway()
        index = task.payload.get("index")
        if not isinstance(index, int) or not 0 <= index < len(self._all):
            raise ValueError(f"index of the task is {index!r}: must be 0 to {len(self._all) - 1}")
        environment = _load(self._config)
        with _credential(endpoint) as variable:
            client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
            context = vf.ModelContext(model=_MODEL, client=client, sampling=self._sampling)
            async with environment.serving():
                episode = await environment.run_episode(self._all[index], context)
        if not episode.ok:
            raise episode_failure(episode)
        return _rewards(episode)


class _Frozen:
    """Settings as the key of a cache."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and other.config == self.config

    def __hash__(self) -> int:
        return hash(repr(self.config))


@cache
def _tasks(frozen: _Frozen, most: int) -> Sequence[Any]:
    """The tasks of a taskset, read once in a process."""
    return list(_load(frozen.config).taskset.take(most))


def _load(config: Mapping[str, Any]) -> Any:
    """A new environment: it holds the connections of one episode."""
    return vf.load_environment(vf.SingleAgentEnvConfig(**config))


@contextmanager
def _credential(endpoint: Endpoint) -> Iterator[str]:
    """A variable that holds the key of this rollout: verifiers takes keys from nowhere else."""
    variable = f"SEAMFLOW_CREDENTIAL_{endpoint.rollout_id.encode().hex()}"
    os.environ[variable] = endpoint.credential
    try:
        yield variable
    finally:
        os.environ.pop(variable, None)


def _rewards(episode: Any) -> Mapping[str, float]:
    if len(episode.traces) != 1:
        raise EnvironmentFailed(f"the episode has {len(episode.traces)} traces: one is expected")
    (trace,) = episode.traces
    named = {name: value for name, value in trace.metrics.items() if value is not None}
    named |= {name: each.value for name, each in trace.rewards.items() if each is not None}
    return {**named, "reward": trace.reward}


_INFRASTRUCTURE = ("ProviderError", "InterceptionError", "TunnelError", "SandboxError")


def episode_failure(episode: Any) -> EnvironmentFailed:
    """TIMEOUT for a passed deadline of verifiers, INFRASTRUCTURE for calls of the policy and for
    the boxes of programs, ENVIRONMENT for the code of tasks, tools and harness."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    message = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason given"
    kind = tokens_pb2.FAILURE_CLASS_ENVIRONMENT
    if any(error.type in _INFRASTRUCTURE for error in errors):
        kind = tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
    elif episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        kind = tokens_pb2.FAILURE_CLASS_TIMEOUT
    return EnvironmentFailed(message[-1000:], kind)


def no_gateway() -> EnvironmentFailed:
    """There is no URL at which the policy could be called."""
    return EnvironmentFailed(
        "no HTTP gateway runs: start one, and set environments.http_gateway_url",
        tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
    )


def plugin_id(name: str) -> str:
    """An id that verifiers finds: it knows top-level modules only.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    if "." not in name:
        return name
    flat = name.replace(".", "_").lower()
    sys.modules.setdefault(flat, importlib.import_module(name))
    return flat
