"""The protocol of a pipeline's socket: from its bytes through hiredis into the waiting batch."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import hiredis
from redis import exceptions

_NONE_YET = object()
# One buffer for all reads: allocating it for each read would cost more than the read.
_BUFFER_BYTES = 1 << 18


_ERRORS: dict[str, type[exceptions.ResponseError | exceptions.ConnectionError]] = {
    "ASK": exceptions.AskError,
    "CLUSTERDOWN": exceptions.ClusterDownError,
    "CROSSSLOT": exceptions.ClusterCrossSlotError,
    "LOADING": exceptions.BusyLoadingError,
    "MASTERDOWN": exceptions.MasterDownError,
    "MOVED": exceptions.MovedError,
    "NOAUTH": exceptions.AuthenticationError,
    "NOPERM": exceptions.NoPermissionError,
    "NOSCRIPT": exceptions.NoScriptError,
    "OOM": exceptions.OutOfMemoryError,
    "READONLY": exceptions.ReadOnlyError,
    "TRYAGAIN": exceptions.TryAgainError,
    "WRONGPASS": exceptions.AuthenticationError,
}
"""Redis error codes with an exception of redis-py."""
_TOO_MANY_CLIENTS = "ERR max number of clients reached"


def _error_of(text: str) -> Exception:
    """The exception of an error reply, as redis-py raises it."""
    if text == _TOO_MANY_CLIENTS:
        return exceptions.ConnectionError(text)
    code, _, message = text.partition(" ")
    kind = _ERRORS.get(code)
    return exceptions.ResponseError(text) if kind is None else kind(message)


class Replies(asyncio.BufferedProtocol):
    """The replies to one batch at a time, on one connection."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._reader = hiredis.Reader(
            protocolError=exceptions.InvalidResponse,
            replyError=_error_of,
            notEnoughData=_NONE_YET,
        )
        self._replies: list[Any] = []
        self._num_expected = 0
        self._arrived: asyncio.Future[None] | None = None
        self.lost = asyncio.get_running_loop().create_future()
        """Done when the connection is."""
        self.usable = True
        """Whether a batch may be sent: the connection is open and no stray reply came."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: uvloop's transports are no subclasses.
        self.transport = cast(asyncio.WriteTransport, transport)
        connection = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def close(self) -> None:
        """Close the connection; batches that wait get an error."""
        self.usable = False
        self.transport.abort()

    def expect(self, number: int, replies: list[Any]) -> asyncio.Future[None]:
        """Put the next `number` replies into `replies` as they come; done with the last.

        Error replies are exceptions in the list; a ConnectionError of the server ends the batch.

        Raises:
            redis.exceptions.ConnectionError: the connection is not usable.
        """
        if not self.usable:
            raise exceptions.ConnectionError("the server closed the connection")
        self._replies, self._num_expected = replies, number
        self._arrived = asyncio.get_running_loop().create_future()
        return self._arrived

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, num_bytes: int) -> None:
        try:
            self._reader.feed(self._buffer[:num_bytes])  # type: ignore[arg-type]
            while (reply := self._reader.gets()) is not _NONE_YET:
                self._take(reply)
        except exceptions.RedisError as error:
            self._end(error)

    def _take(self, reply: Any) -> None:
        if isinstance(reply, exceptions.ConnectionError):
            raise reply
        if self._arrived is None:
            # The following replies could not be matched to commands.
            raise exceptions.ConnectionError("a reply without a command")
        self._replies.append(reply)
        if len(self._replies) == self._num_expected:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(exceptions.ConnectionError(f"the server closed the connection: {error or 'EOF'}"))
        if not self.lost.done():
            self.lost.set_result(None)

    def _end(self, error: Exception | None) -> None:
        self.usable = self.usable and error is None
        arrived, self._arrived = self._arrived, None
        if arrived is None or arrived.done():
            return
        if error is None:
            arrived.set_result(None)
        else:
            arrived.set_exception(error)
