"""One WebSocket of an OpenEnv server: it is the episode, and ends with it."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.environment import CapacityReached, EnvironmentFailed
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from adapters.replies import UnreadableAction

_TIMEOUT = tokens_pb2.FAILURE_CLASS_TIMEOUT
_INFRASTRUCTURE = tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
_OF_SERVER = ("SESSION_ERROR",)


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
