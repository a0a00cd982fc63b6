"""Settings of the tool loop, table [tool_loop]."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.chassis.config.settings import ServerConfig, Settings
from services.tool_loop.prompt_template import PromptTemplate

REGEX = "regex:"
BUILT_IN = ("exact", "math")


class McpServerConfig(Settings):
    """An MCP server whose tools the policy may call. Give `url` or `command`."""

    url: str | None = None
    """Address of a server with streamable HTTP, such as "http://127.0.0.1:8000/mcp"."""
    command: str | None = None
    """Command line of a server over standard input and output, such as "python tools.py"."""
    token_file: Path | None = None
    """File of the bearer token that `url` asks for."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables added to those of `command`."""
    per_episode: bool = False
    """Whether each episode has a connection, or process, of its own: for servers that keep state.
    False: all episodes share one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.url is None) == (self.command is None):
            raise ValueError(
                f"url is {self.url!r} and command is {self.command!r}: give url for a server that "
                "runs, or command for one to start"
            )
        if self.command is not None and not self.arguments:
            raise ValueError(f"command is {self.command!r}: name a program")
        return self

    @property
    def arguments(self) -> tuple[str, ...]:
        """The program of `command` and its arguments."""
        try:
            return tuple(shlex.split(self.command or ""))
        except ValueError as error:
            raise ValueError(f"command is {self.command!r}: {error}; check its quotes") from error


class ToolLoopConfig(ServerConfig):
    """Settings of a stepped environment: prompt, tools, rewards. Serves EnvironmentService."""

    system_prompt: str = ""
    """First message of each episode; empty if there is none."""
    prompt: str = "{question}"
    """User message: text with fields of the task's payload in braces; "{{" and "}}" are braces."""
    tools: tuple[str, ...] = ()
    """Python functions that the policy may call, as "package.module:function"; their JSON Schema
    comes from annotations and docstring."""
    mcp_servers: dict[str, McpServerConfig] = Field(default_factory=dict)
    """MCP servers by name, each a table [tool_loop.mcp_servers.NAME]."""
    rewards: dict[str, str] = Field(default_factory=dict)
    """Rewards by name: "exact", "math", "regex:PATTERN" or "package.module:function", a function
    reward(task, transcript) -> float or dict. Empty: a reward server gives them."""
    answer_field: str = "answer"
    """Field of the payload with the expected answer, or a list of answers that are right."""
    answer_pattern: str = ""
    """Regular expression that finds the answer in the last message: its first group, or all of the
    match; the last match counts. Empty: the whole message."""
    max_turns: int = Field(8, ge=1)
    """Messages of the policy in an episode; after the last one it is cut off and scored."""
    max_episodes: int = Field(256, ge=1)
    """Episodes that run concurrently."""
    tool_timeout_seconds: float = Field(30.0, gt=0)
    """Longest duration of a tool call; then the policy reads that it had no answer."""
    max_tool_characters: int = Field(20_000, ge=100)
    """Characters of a tool's answer that the policy reads; the rest is cut off."""
    reward_timeout_seconds: float = Field(30.0, gt=0)
    """Longest duration of a reward. A function that takes longer fails the episode, which is
    replaced; a comparison that needs over 5 s of CPU scores 0."""

    @property
    def task_fields(self) -> Sequence[str]:
        """The fields that the payload of each task must have: prompt and rewards name them."""
        compares = any(how in BUILT_IN for how in self.rewards.values())
        return (*PromptTemplate(self.prompt).fields, *([self.answer_field] if compares else ()))

    @model_validator(mode="after")
    def _check(self) -> Self:
        PromptTemplate(self.prompt)
        _check_pattern("answer_pattern", self.answer_pattern)
        for name, reward in self.rewards.items():
            _check_reward(name, reward)
        return self


def _check_reward(name: str, reward: str) -> None:
    field = f"rewards.{name}"
    if not re.fullmatch(r"[\w.:-]{1,200}", name):
        raise ValueError(f"rewards has the name {name!r}: use letters, digits, '.', '_' and '-'")
    if reward.startswith(REGEX):
        _check_pattern(field, reward.removeprefix(REGEX))
    elif reward not in BUILT_IN and ":" not in reward:
        raise ValueError(
            f'{field} is {reward!r}: give "exact", "math", "regex:PATTERN" or '
            '"package.module:function"'
        )


def _check_pattern(field: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{field} is {pattern!r}: {error}; give a regular expression of Python"
        ) from error
