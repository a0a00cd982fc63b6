"""Environments of Gymnasium: observations and actions as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from seamflow.environment import Observation, Step, Task

from adapters.gymnasium.spaces import ActionText, to_text
from adapters.replies import UnreadableAction, UnreadableAnswers, replies, tool_arguments

_TOOL = "act"
_MARKED = re.compile(r"\x1b\[4\dm(.*?)\x1b\[0m", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class GymnasiumEnvironment:
    """One environment of Gymnasium, made by its id.

    The payload of a task may have "options", which `reset` of the environment gets. An environment
    made with render_mode "ansi" shows its picture beside the observation, highlighted parts in
    square brackets.
    """

    max_episodes = 64
    is_seeded = True

    def __init__(
        self,
        env_id: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        system_prompt: str = "",
        action_names: Sequence[str] = (),
        use_tool: bool = False,
        max_unreadable: int = 3,
    ) -> None:
        """Keep what an episode is made of.

        Args:
            env_id: Id of the environment, such as "CartPole-v1".
            kwargs: Keyword arguments of `gymnasium.make`.
            system_prompt: Precedes the description of observations and actions.
            action_names: Words for discrete actions, from the first one.
            use_tool: Offer the tool `act`; text is understood as well.
            max_unreadable: The episode ends with this many answers that are no action.

        Raises:
            ValueError: no environment of this id is registered.
        """
        try:
            gymnasium.spec(env_id)
        except gymnasium.error.Error as error:
            raise ValueError(f"env_id is {env_id!r}: {error}") from error
        self.name = f"gymnasium {env_id}"
        self._env_id = env_id
        self._kwargs = dict(kwargs or {})
        self._system_prompt = system_prompt
        self._action_names = action_names
        self._use_tool = use_tool
        self._unreadable = UnreadableAnswers(max_unreadable)
        self._env: gymnasium.Env[Any, Any] | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        """The rules and the first observation."""
        self._env = env = gymnasium.make(self._env_id, **self._kwargs)
        self._actions = ActionText(env.action_space, self._action_names)
        observation, _ = env.reset(seed=seed, options=task.payload.get("options"))
        return Observation(
            messages=[
                {"role": "system", "content": self._rules()},
                {"role": "user", "content": self._shown(observation)},
            ],
            tools=[self._tool()] if self._use_tool else [],
        )

    def step(self, message: Mapping[str, Any]) -> Step:
        assert self._env is not None
        try:
            action = self._action(message)
        except UnreadableAction as error:
            return self._unreadable.explain(message, str(error))
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return Step(
            messages=replies(message, self._shown(observation)),
            rewards=float(reward),
            done=bool(terminated),
            truncated=bool(truncated),
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _action(self, message: Mapping[str, Any]) -> Any:
        arguments = tool_arguments(message, _TOOL)
        if arguments is None:
            return self._actions.of_text(message["content"])
        if "action" not in arguments:
            raise UnreadableAction('The call has no argument "action".')
        return self._actions.of_value(arguments["action"])

    def _rules(self) -> str:
        assert self._env is not None
        how = f"Call the tool {_TOOL} with" if self._use_tool else "Answer each observation with"
        lines = [
            self._system_prompt or f"You act in the environment {self._env_id}.",
            f"Observations are of the space {self._env.observation_space}.",
            f"{how} your action: {self._actions.description()}.",
        ]
        return "\n".join(lines)

    def _shown(self, observation: Any) -> str:
        assert self._env is not None
        text = to_text(observation)
        if self._env.render_mode != "ansi":
            return text
        picture = _MARKED.sub(r"[\1]", str(self._env.render()))
        return f"{text}\n{_COLOUR.sub('', picture)}"

    def _tool(self) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": {"action": self._actions.schema()},
            "required": ["action"],
        }
        return {"name": _TOOL, "description": "Acts once.", "parameters": parameters}
