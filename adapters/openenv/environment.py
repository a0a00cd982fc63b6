"""Environments of OpenEnv: episodes on a running server, over its WebSocket."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.environment import CapacityReached, EnvironmentFailed, Observation, Step, Task
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from adapters.replies import UnreadableAction, UnreadableAnswers, replies, tool_arguments

_TIMEOUT = tokens_pb2.FAILURE_CLASS_TIMEOUT
_INFRASTRUCTURE = tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
_OF_SERVER = ("SESSION_ERROR",)

_TOOL = "act"


class Connection:
    """A connection, opened with the object.

    Its errors: `CapacityReached` if the server takes no more, `EnvironmentFailed` of class
    INFRASTRUCTURE if it cannot be reached or the connection breaks, TIMEOUT for a late answer, and
    ENVIRONMENT for an error of its code.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        self._timeout = timeout
        try:
            self._socket: ClientConnection = connect(
                _websocket_url(url), max_size=None, open_timeout=timeout
            )
        except (OSError, WebSocketException) as error:
            raise self._lost(error) from error

    def send(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the answer to a frame "reset" or "step".

        Raises:
            UnreadableAction: the server refuses the fields of the frame.
        """
        try:
            # A server without room says so, closes, and may have done both before this.
            with suppress(ConnectionClosed):
                self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            answer = json.loads(self._socket.recv(timeout=self._timeout))
        except TimeoutError as error:
            message = f"{self._url} did not answer {kind} within {self._timeout:g} s"
            raise EnvironmentFailed(message, _TIMEOUT) from error
        except (OSError, WebSocketException) as error:
            raise self._lost(error) from error
        if answer["type"] == "error":
            raise self._error(kind, answer["data"])
        data_of_answer: dict[str, Any] = answer["data"]
        return data_of_answer

    def close(self) -> None:
        try:
            self._socket.send(json.dumps({"type": "close"}))
        except (OSError, WebSocketException):
            return  # it has ended
        finally:
            self._socket.close()

    def _error(self, kind: str, data: Mapping[str, Any]) -> Exception:
        code, message = data.get("code", ""), str(data.get("message", ""))
        if code == "CAPACITY_REACHED":
            return CapacityReached(f"{self._url}: {message}")
        if code == "VALIDATION_ERROR" and kind == "step":
            return UnreadableAction(f"The action is refused: {_fields(data)}.")
        said = f"{self._url} answered {kind} with {code}: {message}"
        if code in _OF_SERVER:
            return EnvironmentFailed(said, _INFRASTRUCTURE)
        return EnvironmentFailed(said)

    def _lost(self, error: Exception) -> EnvironmentFailed:
        return EnvironmentFailed(f"connection to {self._url}: {error!r}", _INFRASTRUCTURE)


def action_schema(url: str, timeout: float) -> dict[str, Any]:
    """JSON Schema of an action, of the server at `url`, without its metadata.

    Raises:
        EnvironmentFailed: of class INFRASTRUCTURE, if the server cannot be reached.
    """
    address = f"{url.rstrip('/')}/schema"
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer:  # noqa: S310 -- checked
            schema: dict[str, Any] = json.load(answer)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentFailed(f"{address}: {error!r}", _INFRASTRUCTURE) from error
    properties = dict(schema.get("properties", {}))
    properties.pop("metadata", None)
    return {**schema, "properties": properties}


def _websocket_url(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    return urllib.parse.urlunsplit((scheme, parts.netloc, f"{parts.path.rstrip('/')}/ws", "", ""))


def _fields(data: Mapping[str, Any]) -> str:
    errors = data.get("errors") or ()
    found = [f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', '')}" for each in errors]
    return "; ".join(found) or str(data.get("message", ""))


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
