"""Environments of OpenEnv: episodes on a running server, over its WebSocket."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from seamflow.environment import EnvironmentFailed, Observation, Step, Task

from adapters.openenv.connection import Connection, action_schema
from adapters.replies import UnreadableAction, UnreadableAnswers, replies, tool_arguments

_TOOL = "act"


class OpenEnvEnvironment:
    """The environment of a running OpenEnv server.

    The payload of a task may have "reset": further arguments of its reset, such as split and index.
    """

    max_episodes = 64

    def __init__(
        self,
        url: str,
        *,
        action_field: str = "",
        action_fields: Mapping[str, Any] | None = None,
        observation_field: str = "",
        system_prompt: str = "",
        is_seeded: bool = True,
        max_unreadable: int = 3,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Keep what an episode is made of.

        Args:
            url: Of the server, such as "http://127.0.0.1:8000".
            action_field: The field of an action that holds the policy's text; empty: the policy
                calls the tool `act`, whose parameters are the server's schema of actions.
            action_fields: Further fields of every action.
            observation_field: The field of an observation that is shown; empty: all, as JSON.
            system_prompt: System message; empty if there is none.
            is_seeded: Whether the server repeats episodes for equal seeds.
            max_unreadable: The episode ends with this many answers that are no action.
            timeout_seconds: Longest wait for an answer of the server.

        Raises:
            ValueError: the URL is none.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}: write it as 'http://host:port'")
        self.name = f"openenv {url}"
        self.is_seeded = is_seeded
        self._url = url
        self._action_field = action_field
        self._action_fields = dict(action_fields or {})
        self._observation_field = observation_field
        self._system_prompt = system_prompt
        self._unreadable = UnreadableAnswers(max_unreadable)
        self._timeout = timeout_seconds
        self._connection: Connection | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        tools = [] if self._action_field else [self._tool()]
        self._connection = Connection(self._url, self._timeout)
        # Python environments hand the seed on to numpy or random; 32 bits suit all of them.
        data = {"seed": seed % 2**32, "episode_id": task.task_id, **task.payload.get("reset", {})}
        answer = self._connection.send("reset", data)
        if answer.get("done"):
            raise EnvironmentFailed(f"{self._url} ended the episode of {task.task_id!r} at reset")
        shown = self._shown(answer)
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return Observation(messages=[*system, {"role": "user", "content": shown}], tools=tools)

    def step(self, message: Mapping[str, Any]) -> Step:
        assert self._connection is not None
        try:
            answer = self._connection.send("step", self._action(message))
        except UnreadableAction as error:
            return self._unreadable.explain(message, str(error))
        return Step(
            messages=replies(message, self._shown(answer)),
            rewards=float(answer.get("reward") or 0.0),
            done=bool(answer.get("done")),
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _action(self, message: Mapping[str, Any]) -> dict[str, Any]:
        arguments = tool_arguments(message, _TOOL)
        if arguments is not None:
            return {**self._action_fields, **arguments}
        if self._action_field:
            return {**self._action_fields, self._action_field: message["content"]}
        raise UnreadableAction(f"Call the tool {_TOOL!r}.")

    def _shown(self, answer: Mapping[str, Any]) -> str:
        observation = answer.get("observation", {})
        if not self._observation_field:
            return json.dumps(observation, sort_keys=True)
        if self._observation_field not in observation:
            raise EnvironmentFailed(
                f"observation_field is {self._observation_field!r}, the observation has "
                f"{', '.join(sorted(observation))}"
            )
        value = observation[self._observation_field]
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)

    def _tool(self) -> dict[str, Any]:
        fixed: Sequence[str] = tuple(self._action_fields)
        schema = action_schema(self._url, self._timeout)
        properties = {k: v for k, v in schema["properties"].items() if k not in fixed}
        required = [name for name in schema.get("required", ()) if name not in fixed]
        parameters = {**schema, "properties": properties, "required": required}
        return {"name": _TOOL, "description": "Acts once.", "parameters": parameters}
