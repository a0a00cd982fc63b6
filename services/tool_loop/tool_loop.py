"""The tool loop: episodes in which the policy calls tools until it answers without a call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Tool as McpTool
from seamflow.channel import is_loopback
from seamflow.client.messages import Message
from seamflow.client.turn import Task
from seamflow.environment import EnvironmentFailed, Step
from seamflow.environment.environment_class import EnvironmentClass, reward_function
from seamflow.environment.mcp_connection import McpCallError, McpConnection, result_text
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.user_code.user_calls import awaited

from services.tool_loop.config import BUILT_IN, REGEX, McpServerConfig, ToolLoopConfig
from services.tool_loop.prompt_template import PromptTemplate
from services.tool_loop.score_client import ScoreClient
from services.tool_loop.score_process import Transcript, named_scores
from services.tool_loop.toolbox import Tool, Toolbox, ToolError, python_tool
from services.tool_loop.user_function import load_function

_HTTP_SECONDS = 30.0

START_TIMEOUT_SECONDS = 30.0
"""Longest wait for the MCP servers at start."""


class Rewards:
    """All rewards of [tool_loop.rewards].

    Coroutine functions run in the loop of this process and are cancelled at the limit; all others
    are computed by a `ScoreClient`.
    """

    def __init__(self, config: ToolLoopConfig) -> None:
        """Load the functions.

        Raises:
            ValueError: one does not exist or does not take (task, transcript).
        """
        self._rewards = config.rewards
        self._timeout = config.reward_timeout_seconds
        functions = {
            name: reward_function(load_function(how, f"[tool_loop.rewards] {name}"))
            for name, how in config.rewards.items()
            if how not in BUILT_IN and not how.startswith(REGEX)
        }
        self._coroutines = {
            name: function
            for name, function in functions.items()
            if inspect.iscoroutinefunction(function)
        }
        others = {name: how for name, how in config.rewards.items() if name not in self._coroutines}
        self._scores = ScoreClient(
            others, config.answer_field, config.answer_pattern, config.reward_timeout_seconds
        )
        self._has_others = bool(others)

    def none_yet(self) -> dict[str, float]:
        """Each reward as it is before the end: 0."""
        return dict.fromkeys(self._rewards, 0.0)

    async def check(self) -> None:
        """Start what scores need; `EnvironmentFailed` if that is impossible."""
        if self._has_others:
            await self._scores.start()

    async def close(self) -> None:
        """End the process of scores."""
        await self._scores.close()

    async def of(self, task: Task, transcript: Transcript) -> dict[str, float]:
        """Rewards by name, each once.

        Raises:
            EnvironmentFailed: a reward cannot be computed; others are those of coroutine functions.
        """
        rewards: dict[str, float] = {}
        for name in self._rewards:
            for key, value in (await self._score(name, task, transcript)).items():
                if key in rewards:
                    raise EnvironmentFailed(
                        f"[tool_loop.rewards] gives the reward {key!r} twice, the second time by "
                        f"{name!r}: rename one of them"
                    )
                rewards[key] = value
        return rewards

    async def _score(self, name: str, task: Task, transcript: Transcript) -> dict[str, float]:
        function: Any = self._coroutines.get(name)
        how = self._rewards[name]
        if function is None:
            return await self._scores.score(name, task, transcript)
        try:
            async with asyncio.timeout(self._timeout) as limit:
                return named_scores(name, how, await awaited(function(task, transcript)))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._scores.too_slow(name, "make it faster, or") from error


def mcp_connection(name: str, config: McpServerConfig, start_timeout: float) -> McpConnection:
    """A connection to the server of table `name`."""
    where = f"url = {config.url!r}" if config.url else f"command = {config.command!r}"
    where = f"[tool_loop.mcp_servers.{name}] {where}"
    return McpConnection(where, lambda: _client(config), start_timeout)


@asynccontextmanager
async def _client(config: McpServerConfig) -> AsyncIterator[Client]:
    if config.url is None:
        program, *arguments = config.arguments
        parameters = StdioServerParameters(command=program, args=arguments, env=config.env or None)
        async with Client(parameters) as client:
            yield client
        return
    headers = {}
    if config.token_file is not None:
        headers["authorization"] = f"Bearer {config.token_file.read_text(encoding='utf-8').strip()}"
    timeout = httpx2.Timeout(_HTTP_SECONDS, read=None)
    uses_proxies = not is_loopback(httpx2.URL(config.url).host)  # of the environment
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=uses_proxies) as http,
        Client(streamable_http_client(config.url, http_client=http)) as client,
    ):
        yield client


def mcp_tools(
    name: str, connection: McpConnection, found: Iterable[McpTool], timeout: float
) -> list[Tool]:
    """The tools that the MCP server of table `name` listed, called over `connection`."""

    def made(each: McpTool) -> Tool:
        return Tool(
            name=each.name,
            description=each.description or "",
            parameters=each.input_schema,
            origin=f"[tool_loop.mcp_servers.{name}]",
            call=lambda arguments: called(connection, each.name, arguments, timeout),
        )

    return [made(each) for each in found]


async def called(
    connection: McpConnection, tool: str, arguments: Mapping[str, Any], timeout: float
) -> str:
    """The tool's answer as text.

    Raises:
        ToolError: the tool failed, by a result or an error of JSON-RPC, gave no answer within
            `timeout` seconds, or one that breaks its own schema.
        EnvironmentFailed: INFRASTRUCTURE: the server cannot be reached or is lost.
    """
    try:
        result = await connection.call(tool, arguments, timeout)
    except TimeoutError as error:
        raise ToolError(f"tool {tool} gave no answer within {timeout:g} s") from error
    except McpCallError as error:
        raise ToolError(str(error)) from error
    text = result_text(result)
    if result.is_error:
        raise ToolError(text or f"tool {tool} failed without a text")
    return text


class ToolLoop:
    """Prompt, tools and rewards that all episodes share."""

    def __init__(self, config: ToolLoopConfig) -> None:
        """Load the user's functions.

        Raises:
            ValueError: names the setting that is wrong, its value and the cure.
        """
        self.max_turns = config.max_turns
        """Messages of the policy in an episode."""
        self.rewards = Rewards(config)
        self._config = config
        self._prompt = PromptTemplate(config.prompt)
        self._functions = [_function(config, i, name) for i, name in enumerate(config.tools)]
        self._shared: dict[str, McpConnection] = {}
        self._mcp_tools: list[Tool] = []
        self._listed: dict[str, list[Any]] = {}

    async def open(self) -> None:
        """Connect to the MCP servers, list their tools, and start what rewards need.

        Raises:
            EnvironmentFailed: one cannot be reached.
            ValueError: two tools have the same name, or one has too long a name.
        """
        await self.rewards.check()
        for name, server in self._config.mcp_servers.items():
            connection = self._connection(name)
            self._listed[name] = await connection.tools()
            if server.per_episode:
                await connection.close()
            else:
                self._shared[name] = connection
        self.declared()

    async def close(self) -> None:
        for connection in self._shared.values():
            await connection.close()
        await self.rewards.close()

    def declared(self) -> EnvironmentClass:
        """What a server of environments needs."""
        return EnvironmentClass(
            name="tool_loop",
            make=lambda: ToolEpisode(self),
            kind=pb.ENVIRONMENT_KIND_STEPPED,
            tools=self.toolbox({}).schemas(),
            tasks=(),
            max_episodes=self._config.max_episodes,
            is_seeded=False,
        )

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """The first messages of an episode; `EnvironmentFailed` if the payload lacks a field."""
        system = self._config.system_prompt
        user = {"role": "user", "content": self._prompt.render(task)}
        return [{"role": "system", "content": system}, user] if system else [user]

    def own_connections(self) -> dict[str, McpConnection]:
        """New connections to the servers that each episode has of its own, by name."""
        servers = self._config.mcp_servers.items()
        return {name: self._connection(name) for name, server in servers if server.per_episode}

    def toolbox(self, own: Mapping[str, McpConnection]) -> Toolbox:
        """The tools of an episode with these connections of its own."""
        tools = list(self._functions)
        for name, listed in self._listed.items():
            connection = own.get(name) or self._shared.get(name) or self._connection(name)
            tools += mcp_tools(name, connection, listed, self._config.tool_timeout_seconds)
        return Toolbox(tools, self._config.max_tool_characters)

    def _connection(self, name: str) -> McpConnection:
        server = self._config.mcp_servers[name]
        return mcp_connection(name, server, START_TIMEOUT_SECONDS)


class ToolEpisode:
    """One episode: a stepped environment as users write them."""

    def __init__(self, loop: ToolLoop) -> None:
        self._loop = loop
        self._own = loop.own_connections()
        self._toolbox = loop.toolbox(self._own)
        self._num_turns = 0

    async def reset(self, task: Task, seed: int) -> list[dict[str, Any]]:
        self._task = task
        self._transcript: list[Message] = list(self._loop.messages(task))
        return [dict(message) for message in self._transcript]

    async def step(self, message: Message) -> Step:
        """Answers of the tools that it calls; without a call, or too late for one, rewards."""
        self._num_turns += 1
        self._transcript.append(message)
        calls = message.get("tool_calls") or ()
        if not calls or self._num_turns >= self._loop.max_turns:
            rewards = await self._loop.rewards.of(self._task, self._transcript)
            return Step(rewards=rewards, done=not calls, truncated=bool(calls))
        answers = await self._toolbox.answers(calls)
        self._transcript += answers
        return Step(messages=answers, rewards=self._loop.rewards.none_yet())

    async def close(self) -> None:
        for connection in self._own.values():
            await connection.close()


def _function(config: ToolLoopConfig, index: int, name: str) -> Tool:
    function = load_function(name, f"tools[{index}]")
    return python_tool(function, f"tools[{index}] = {name!r}", config.tool_timeout_seconds)
