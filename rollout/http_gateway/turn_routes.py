"""Routes that sample: each POST is one turn, in any dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aiohttp import web
from aiohttp.web import StreamResponse
from seamflow.errors import SeamflowError

from rollout.http_gateway import limits
from rollout.http_gateway.api_error import ApiError, from_seamflow
from rollout.http_gateway.config import HttpGatewayConfig
from rollout.http_gateway.dialects.dialect import (
    Dialect,
    EventStream,
    Json,
    TurnRequest,
    checks,
)
from rollout.http_gateway.lease_holds import LeaseHolds
from rollout.http_gateway.request_body import credential, read_body
from rollout.http_gateway.turn_ids import TurnIds
from services.chassis.rpc.request_budget import RequestBudget

if TYPE_CHECKING:
    from seamflow.client import Client, Turn
    from seamflow.client.turn import TurnStream


class HeldReply:
    """Use it as a context, which keeps the reply alive."""

    def __init__(
        self,
        request: web.Request,
        config: HttpGatewayConfig,
        headers: Mapping[str, str],
        start: bytes,
        keep_alive: Callable[[], bytes],
    ) -> None:
        """`start` is what comes first, `keep_alive` a sign of life."""
        self.has_begun = False
        """Whether its status and first bytes are sent."""
        self._request = request
        self._config = config
        self._response = web.StreamResponse(headers=headers)
        self._start = start
        self._sign = keep_alive
        self._unsent = bytearray()
        self._num_writes = 0
        self._clock = asyncio.get_running_loop().time
        self._held_until = self._clock() + config.hold_seconds
        self._keeping: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Send `data`, or hold it back."""
        if not data:
            return
        self._num_writes += 1
        self._unsent += data
        if self.has_begun or self._clock() >= self._held_until:
            await self._send()

    async def end(self, data: bytes, headers: Mapping[str, str] | None = None) -> StreamResponse:
        """Send the rest and wait until it is sent; `headers` too, unless the reply has begun.

        Raises:
            ConnectionError: the client has left.
        """
        if not self.has_begun:
            if self._keeping is not None:
                self._keeping.cancel()
            body = self._start + bytes(self._unsent) + data
            response = web.Response(
                body=body, headers={**self._response.headers, **(headers or {})}
            )
            await response.prepare(self._request)
            await response.write_eof()
            return response
        self._unsent += data
        await self._send()
        await self._response.write_eof()
        return self._response

    def cut(self) -> None:
        """Close the connection, for the client to see that the reply is incomplete."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _send(self) -> None:
        if not self._response.prepared:
            self._unsent[:0] = self._start
            await self._response.prepare(self._request)
            self.has_begun = True
        elif not self.has_begun:
            return  # another task is sending the head, and sends this after it
        while self._unsent:
            data = bytes(self._unsent)
            self._unsent.clear()
            await self._response.write(data)

    async def _keep_alive(self) -> None:
        await asyncio.sleep(self._config.hold_seconds)
        if self._unsent:
            await self._send()
        while True:
            before = self._num_writes
            await asyncio.sleep(limits.KEEP_ALIVE_SECONDS)
            if self._num_writes == before:
                if not self.has_begun:
                    await self._send()
                await self.write(self._sign())

    async def __aenter__(self) -> Self:
        self._keeping = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])


_CHUNK_SECONDS = 1.0
"""Interval of chunks of a reply that is sent whole; a killed server loses at most this much."""
_JSON = "application/json"
_SSE = "text/event-stream"


class TurnRoutes:
    def __init__(self, config: HttpGatewayConfig, client: Client, holds: LeaseHolds) -> None:
        self._config = config
        self._client = client
        self._holds = holds
        self._turn_ids = TurnIds()
        self._budget = RequestBudget(limits.MAX_INFLIGHT_BYTES, limits.MAX_CALLS_PER_ROLLOUT)

    def handler(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler of a route that speaks `dialect`."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._call(request, dialect)

        return handle

    async def _call(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        rollout_id, shown = request.match_info["rollout_id"], credential(request)
        with ExitStack() as stack:
            num_bytes = request.content_length or self._config.max_body_bytes
            stack.enter_context(self._budget.reserve(num_bytes, shown))
            body = await read_body(request, self._config)
            turn_request = dialect.parse(body)
            rollout = self._client.rollout(rollout_id, shown)
            stack.enter_context(self._holds.call(rollout_id, shown))
            turn_id = await self._turn_ids.of(request, body, rollout)
            if not turn_request.sampling.HasField("max_new_tokens"):
                turn_request.sampling.max_new_tokens = self._config.default_max_tokens
            stream = rollout.stream(
                **turn_request.arguments,
                turn_id=turn_id,
                chunk_seconds=0.0 if turn_request.stream else _CHUNK_SECONDS,
                stream_text=turn_request.stream,
            )
            reply = _stream if turn_request.stream else _whole

            def has_ended() -> bool:
                return stream.turn.finish_reason is not None

            stack.enter_context(self._turn_ids.call(rollout_id, turn_id, request, has_ended))
            return await reply(request, self._config, dialect, turn_request, stream)


async def _whole(
    request: web.Request,
    config: HttpGatewayConfig,
    dialect: Dialect,
    turn_request: TurnRequest,
    stream: TurnStream,
) -> web.StreamResponse:
    """One JSON object, after white space if the turn takes long."""
    async with HeldReply(
        request, config, _headers(stream, _JSON), start=b"", keep_alive=lambda: b" "
    ) as reply:
        try:
            async with _limit(config, dialect):
                async for _ in stream:
                    pass
            body = _json(dialect.reply(turn_request, stream.turn))
            return await reply.end(body, _check_headers(stream.turn))
        except ApiError:
            if reply.has_begun:  # with status 200: the client's next attempt gets the error
                reply.cut()
            raise


async def _stream(
    request: web.Request,
    config: HttpGatewayConfig,
    dialect: Dialect,
    turn_request: TurnRequest,
    stream: TurnStream,
) -> web.StreamResponse:
    events: EventStream = dialect.events(turn_request, stream.turn.turn_id)
    async with HeldReply(
        request, config, _headers(stream, _SSE), start=events.start(), keep_alive=events.keep_alive
    ) as reply:
        try:
            async with _limit(config, dialect):
                async for chunk in stream:
                    await reply.write(events.chunk(chunk))
            return await reply.end(events.end(stream.turn), _check_headers(stream.turn))
        except ApiError as error:
            if not reply.has_begun:
                raise
            return await reply.end(events.error(error))


@asynccontextmanager
async def _limit(config: HttpGatewayConfig, dialect: Dialect) -> AsyncIterator[None]:
    """The turn's timeout, and errors of the rollout gateway as `ApiError`."""
    seconds = config.turn_timeout_seconds
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        message = f"the turn did not end within {seconds:g} s (turn_timeout_seconds)"
        raise ApiError(504, f"{message}; the same call continues it", code="timeout") from None
    except SeamflowError as error:
        raise from_seamflow(error).renamed(dialect.NAMES) from error


def _check_headers(turn: Turn) -> dict[str, str]:
    """Whether the answer is what was demanded, for a reply that is sent at once."""
    headers = {}
    for name, check in checks(turn).items():
        reason = check.reason.encode("ascii", "replace").decode()
        reason = "".join(c if c.isprintable() else " " for c in reason)
        headers[f"seamflow-{name.replace('_', '-')}"] = "; ".join(
            filter(None, (check.result, reason))
        )
    return headers


def _headers(stream: TurnStream, content_type: str) -> dict[str, str]:
    return {
        "content-type": content_type,
        "cache-control": "no-cache",
        "seamflow-turn-id": stream.turn.turn_id,
    }


def _json(reply: Json) -> bytes:
    return json.dumps(reply, ensure_ascii=False, separators=(",", ":")).encode()
