"""An MCP server as an environment: the policy calls its tools, the server decides the reward.

A tool may return structured content with "reward" (number or bool), "done" (bool) and "text" (what
the policy sees); all three are optional. Rewards add up over the episode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mcp import Client, StdioServerParameters
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentFailed, Observation, Step, Task
from seamflow.environment.mcp_connection import McpCallError, McpConnection, result_text

_NOT_SHOWN = ("reward", "done")


class McpToolsEnvironment:
    """The tools of one MCP server. An answer without a tool call is the final one.

    The payload of a task has what `prompt` names; it goes to `reset_tool` and `reward_tool` whole.
    """

    max_episodes = 16

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        url: str = "",
        env: Mapping[str, str] | None = None,
        prompt: str = "{question}",
        system_prompt: str = "",
        reset_tool: str = "",
        reward_tool: str = "",
        answer_field: str = "",
        tasks: Sequence[Mapping[str, Any]] = (),
        is_seeded: bool = False,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Keep what an episode is made of.

        Args:
            command: Starts a server on stdin and stdout, one for each episode.
            url: Of a running server, such as "http://127.0.0.1:8000/mcp".
            env: Variables of the started server.
            prompt: First user message, with fields of the payload in braces; not used with
                `reset_tool`.
            system_prompt: System message; empty if there is none.
            reset_tool: Tool that starts the episode, with arguments `task` and `seed`; its text is
                the first user message. The policy does not see the tool.
            reward_tool: Tool that gets `task` and `answer` of the final answer. Hidden as well.
            answer_field: Field of the payload that a final answer must equal for reward 1.
            tasks: Payloads.
            is_seeded: Whether the server repeats episodes for equal seeds.
            timeout_seconds: Longest wait for an answer of the server.

        Raises:
            ValueError: not exactly one of command and url is given.
        """
        if bool(command) == bool(url):
            raise ValueError(
                f"command is {list(command)} and url is {url!r}: give one of both, a command that "
                "starts an MCP server or the URL of a running one"
            )
        self._server: Any = url
        if command:
            variables = dict(env) if env is not None else None
            self._server = StdioServerParameters(
                command=command[0], args=list(command[1:]), env=variables
            )
        self._where = url or " ".join(command)
        self.name = f"mcp {self._where}"[:200]
        self.tasks = [dict(task) for task in tasks]
        self.is_seeded = is_seeded
        self._prompt = prompt
        self._system_prompt = system_prompt
        self._reset_tool = reset_tool
        self._reward_tool = reward_tool
        self._answer_field = answer_field
        self._timeout = timeout_seconds
        self._session: McpConnection | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        """Connect, and ask the question of the task."""
        self._session = McpConnection(
            f"MCP server {self._where}",
            lambda: Client(self._server),
            self._timeout,
            reconnects=False,
        )
        tools = await self._session.tools()
        names = {tool.name for tool in tools}
        hidden = {self._reset_tool, self._reward_tool} - {""}
        if missing := hidden - names:
            raise EnvironmentFailed(f"{self._where} has no tool {sorted(missing)}: {sorted(names)}")
        self._names, self._task = names - hidden, dict(task.payload)
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return Observation(
            messages=[*system, {"role": "user", "content": await self._question(seed)}],
            tools=[_tool(tool) for tool in tools if tool.name in self._names],
        )

    async def step(self, message: Mapping[str, Any]) -> Step:
        """Call the tools of the message, or score the final answer."""
        calls = message.get("tool_calls") or []
        if not calls:
            return Step(rewards=await self._score(message["content"]), done=True)
        answers, reward, done = [], 0.0, False
        for call in calls:
            text, fields = await self._called(call["function"])
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            reward += float(fields.get("reward") or 0.0)
            done = done or bool(fields.get("done"))
        return Step(messages=answers, rewards=reward, done=done)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _called(self, function: Mapping[str, str]) -> tuple[str, Mapping[str, Any]]:
        """Text and structured content of a call; a text that explains one that is no action."""
        if function["name"] not in self._names:
            known = ", ".join(sorted(self._names))
            return f"There is no tool {function['name']!r}; there are {known}.", {}
        try:
            arguments = json.loads(function["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("no JSON object")  # noqa: TRY004, TRY301 -- said below
        except (ValueError, RecursionError) as error:
            return f"The arguments are no JSON object: {error}.", {}
        try:
            result = await self._call(function["name"], arguments)
        except McpCallError as error:
            return f"The call failed: {error}.", {}
        return _read(result)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> Any:
        assert self._session is not None
        try:
            return await self._session.call(tool, arguments, self._timeout)
        except TimeoutError as error:
            message = f"{self._where}, tool {tool}: over {self._timeout:g} s"
            raise EnvironmentFailed(message, tokens_pb2.FAILURE_CLASS_TIMEOUT) from error

    async def _question(self, seed: int) -> str:
        if self._reset_tool:
            text, _ = await self._hidden(self._reset_tool, {"task": self._task, "seed": seed})
            return text
        try:
            return self._prompt.format_map(self._task)
        except KeyError as error:
            raise EnvironmentFailed(
                f"prompt is {self._prompt!r}: the payload has no field {error}, it has "
                f"{sorted(self._task)}"
            ) from error

    async def _score(self, answer: str) -> float:
        if self._reward_tool:
            arguments = {"task": self._task, "answer": answer}
            _, fields = await self._hidden(self._reward_tool, arguments)
            if "reward" not in fields:
                raise EnvironmentFailed(f"tool {self._reward_tool} gave no field reward: {fields}")
            return float(fields["reward"])
        if not self._answer_field:
            return 0.0
        if self._answer_field not in self._task:
            raise EnvironmentFailed(f"the payload has no field {self._answer_field!r}")
        return float(answer.strip() == str(self._task[self._answer_field]).strip())

    async def _hidden(self, tool: str, arguments: dict[str, Any]) -> tuple[str, Mapping[str, Any]]:
        try:
            result = await self._call(tool, arguments)
        except McpCallError as error:
            raise EnvironmentFailed(f"tool {tool} of {self._where}: {error}") from error
        if result.is_error:
            raise EnvironmentFailed(f"tool {tool} of {self._where}: {_read(result)[0]}")
        return _read(result)


def _tool(tool: Any) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }


def _read(result: Any) -> tuple[str, Mapping[str, Any]]:
    """What the policy sees of a result, and its structured content; that of an error is none."""
    fields = result.structured_content
    if result.is_error or not isinstance(fields, dict):
        return result_text(result), {}
    if "text" in fields:
        return str(fields["text"]), fields
    shown = {name: value for name, value in fields.items() if name not in _NOT_SHOWN}
    left = shown if shown or not fields else None
    return result_text(result.model_copy(update={"structured_content": left})), fields
