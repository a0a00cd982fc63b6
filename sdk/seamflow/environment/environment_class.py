"""What a user's environment class declares, and loading of it by name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seamflow.client.messages import Tool, to_messages
from seamflow.client.turn import Task
from seamflow.environment.environment import RewardFunction
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.user_code.user_modules import import_user_module

DEFAULT_EPISODES = 64
_MAX_TOOL_NAME = 128
"""Characters, as the Model Context Protocol has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentClass:
    """An environment class, or a function that makes its objects, with what it declares."""

    name: str
    make: Callable[[], Any]
    """Makes the object of an episode."""
    kind: pb.EnvironmentKind.ValueType
    tools: Sequence[Tool]
    tasks: Sequence[Task]
    """Tasks of its own; empty: it takes any."""
    max_episodes: int
    is_seeded: bool
    """Whether an episode depends on task, seed and messages alone."""

    def __post_init__(self) -> None:
        """Raises `ValueError`: a tool has no name, or a longer one than the gateway takes."""
        for index, tool in enumerate(to_messages((), self.tools).tools):
            if not 1 <= len(tool.name) <= _MAX_TOOL_NAME:
                raise ValueError(
                    f"tools[{index}].name is {tool.name!r}: give a name of 1 to {_MAX_TOOL_NAME} "
                    "characters"
                )

    @classmethod
    def of(
        cls, environment: Callable[[], Any], max_episodes: int | None = None
    ) -> EnvironmentClass:
        """Read the attributes of a class; of a function those of the object that it makes.

        Raises:
            ValueError: names the method or attribute that is missing or wrong.
        """
        if not callable(environment):
            raise ValueError(  # noqa: TRY004 -- settings raise ValueError
                f"environment is {environment!r}: give the class itself, or a function that makes "
                "an object of it for each episode"
            )
        name = getattr(environment, "__name__", type(environment).__name__)
        declared = environment if inspect.isclass(environment) else environment()
        most = max_episodes or getattr(declared, "max_episodes", DEFAULT_EPISODES)
        if not isinstance(most, int) or most < 1:
            raise ValueError(f"max_episodes of {name} is {most!r}: must be an int of at least 1")
        return cls(
            name=str(getattr(declared, "name", name)),
            make=environment,
            kind=_kind(declared, name),
            tools=tuple(_value(declared, "tools")),
            tasks=tuple(_task(i, task) for i, task in enumerate(_value(declared, "tasks"))),
            max_episodes=most,
            is_seeded=bool(getattr(declared, "is_seeded", False)),
        )


def with_arguments(
    environment: Callable[..., Any], arguments: Mapping[str, Any]
) -> Callable[[], Any]:
    """A function that makes an object of a class with these keyword arguments.

    Raises:
        ValueError: the class does not take them.
    """
    name = getattr(environment, "__name__", repr(environment))
    try:
        taken = inspect.signature(environment)
        taken.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"--arguments is {json.dumps(dict(arguments))}: {name}{taken} does not take them: "
            f"{error}"
        ) from error

    def make() -> Any:
        return environment(**arguments)

    make.__name__ = name
    return make


def _kind(declared: Any, name: str) -> pb.EnvironmentKind.ValueType:
    if callable(getattr(declared, "run", None)):
        return pb.ENVIRONMENT_KIND_SELF_DRIVING
    missing = [m for m in ("reset", "step") if not callable(getattr(declared, m, None))]
    if missing:
        raise ValueError(
            f"environment {name} has no method {' and no '.join(missing)}: define reset(self, "
            "task, seed) and step(self, message), or run(self, task, endpoint, seed)"
        )
    return pb.ENVIRONMENT_KIND_STEPPED


def _value(declared: Any, attribute: str) -> Any:
    """The attribute, or what it returns as a function without arguments."""
    value = getattr(declared, attribute, ())
    return value() if callable(value) else value


def _task(index: int, task: object) -> Task:
    if isinstance(task, Task):
        return task
    if isinstance(task, Mapping):
        return Task(task_id=str(index), payload=task)
    raise ValueError(f"tasks[{index}] is {task!r}: give a mapping, its payload, or a seamflow.Task")


def load_object(name: str, field: str) -> Any:
    """What "package.module:Name" names; `field` is named in errors.

    Raises:
        ValueError: it does not exist; the message names what is missing.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"{field} is {name!r}: write it as 'package.module:Name'")
    try:
        return getattr(import_user_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(f"{field} is {name!r}: {error}; is its folder on PYTHONPATH?") from error
    except AttributeError as error:
        raise ValueError(f"{field} is {name!r}: {error}") from error


def reward_function(function: object) -> RewardFunction:
    """`function`, checked.

    Raises:
        ValueError: it cannot be called with a task and a transcript.
    """
    if not callable(function):
        raise ValueError(  # noqa: TRY004 -- settings raise ValueError
            f"reward is {function!r}: give a function reward(task, transcript)"
        )
    try:
        inspect.signature(function).bind(None, ())
    except TypeError as error:
        raise ValueError(
            f"reward {function!r}: {error}; define it as reward(task, transcript)"
        ) from error
    return function
