"""The replies on a connection that redis-py opened, without what redis-py does for each of them.

Once a connection is open and authenticated, its transport gets `Replies` as its protocol: bytes go
from the socket to hiredis and from there into the batch that waits for them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import hiredis
from redis import exceptions
from redis._parsers.base import BaseParser

__all__ = ["Replies"]

_NONE_YET = object()
# The same bytes for every read: fresh ones, by the hundred kilobytes, cost more than the reading.
_BUFFER_BYTES = 1 << 18


class Replies(asyncio.BufferedProtocol):
    """Replies to one batch at a time."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._reader = hiredis.Reader(
            protocolError=exceptions.InvalidResponse,
            replyError=BaseParser.parse_error,
            notEnoughData=_NONE_YET,
        )
        self._replies: list[Any] = []
        self._wanted = 0
        self._arrived: asyncio.Future[None] | None = None
        self.lost = asyncio.get_running_loop().create_future()
        """Done when the connection is."""
        self.usable = True
        """Whether a batch may be sent: nobody closed, and nothing came that was not asked for."""

    def expect(self, number: int, replies: list[Any]) -> asyncio.Future[None]:
        """Put the next `number` replies into `replies` as they come; done with the last.

        Errors stand for themselves, except ConnectionErrors of the server, which end the batch.

        Raises:
            redis.exceptions.ConnectionError: the connection is not usable.
        """
        if not self.usable:
            raise exceptions.ConnectionError("the server closed the connection")
        self._replies, self._wanted = replies, number
        self._arrived = asyncio.get_running_loop().create_future()
        return self._arrived

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._buffer

    def buffer_updated(self, num_bytes: int) -> None:
        """Bytes from the server."""
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
            # Whatever follows, nobody could tell to what it is the reply.
            raise exceptions.ConnectionError("a reply that nobody waits for")
        self._replies.append(reply)
        if len(self._replies) == self._wanted:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        """The server, or we, closed."""
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
