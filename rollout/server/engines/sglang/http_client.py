"""Calls to one SGLang server: control over HTTP, generation as server-sent events.

Health is asked with /model_info and /ready, never with /health: that one runs a generation, hangs
while the engine is paused, and makes it report itself unhealthy afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from rollout.server.engines.engine import EngineError
from services.chassis.log import get_logger

# Of calls that SGLang's front end answers by itself.
_ASK_SECONDS = 30.0
_ASK_AGAIN_SECONDS = 2.0
_FLUSH_AGAIN_SECONDS = 0.05
# Reading a large checkpoint from a cold disk takes minutes.
_LOAD_SECONDS = 1800.0
_JSON = {"Content-Type": "application/json"}

ConnectionLost = aiohttp.ClientError


class Refused(EngineError):  # noqa: N818 -- names the event
    """SGLang answered a call with an error; `status` is its HTTP code."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"SGLang refused {path} with {status}: {message}")
        self.status = status


class Connection:
    """Connection to the server at `url`. All calls raise `ConnectionLost` if it does not answer."""

    def __init__(self, url: str, *, control_seconds: float) -> None:
        """Must be made in a running event loop. Calls to the scheduler take `control_seconds`."""
        self.url = url.rstrip("/")
        self._control_seconds = control_seconds
        # Every turn is one open response: no bound on connections, no time limit on streams.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            auto_decompress=False,
        )

    async def generate(self, body: dict[str, Any], receive: Callable[[Any], None]) -> None:
        """POST /generate and give every message of its stream to `receive`.

        Raises `ConnectionLost` if the stream ends before its last message.
        """
        data = json.dumps(body).encode()
        async with self._session.post(f"{self.url}/generate", data=data, headers=_JSON) as response:
            if response.status != 200:
                raise Refused("/generate", response.status, await response.text())
            rest, is_whole = b"", False
            # Read to the end: a connection that is left earlier cannot be used again.
            async for received in response.content.iter_any():
                *events, rest = (rest + received).split(b"\n\n")
                for event in events:
                    is_whole = event == b"data: [DONE]"
                    if not is_whole:
                        receive(json.loads(event[6:]))
        if not is_whole:
            raise aiohttp.ServerDisconnectedError("the stream ended without its last message")

    async def model_info(self) -> dict[str, Any]:
        """GET /model_info: answers in milliseconds in every state."""
        return await self._call("GET", "/model_info", seconds=_ASK_SECONDS)

    async def server_info(self) -> dict[str, Any]:
        """GET /server_info: the arguments the server resolved, and its limits."""
        return await self._call("GET", "/server_info")

    async def until_there(self) -> None:
        while True:
            with contextlib.suppress(ConnectionLost, TimeoutError):
                await self.model_info()
                return
            get_logger().info("waiting_for_engine", url=self.url)
            await asyncio.sleep(_ASK_AGAIN_SECONDS)

    async def is_ready(self) -> bool:
        """Whether it has warmed up; servers too old for /ready count as ready."""
        async with self._session.get(f"{self.url}/ready") as response:
            return response.status in (200, 404)

    async def pause_in_place(self) -> None:
        """Hold running requests with their cache; new ones wait in SGLang's front end."""
        await self._call("POST", "/pause_generation", {"mode": "in_place"})

    async def go_on(self) -> None:
        """Undo a pause. No effect without one."""
        await self._call("POST", "/continue_generation", {"torch_empty_cache": False})

    async def abort(self, rid: str) -> None:
        """End one request; SGLang takes `rid` as a prefix, so ids must be of one length."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End all requests in the scheduler; those not yet there are unaffected."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def flush_when_idle(self, *, abort: bool = False) -> None:
        """Drop the prefix cache once no request runs; with `abort`, abort them first."""
        while not await self._flushed():
            if abort:
                await self.abort_all()
            await asyncio.sleep(_FLUSH_AGAIN_SECONDS)

    async def _flushed(self) -> bool:
        try:
            await self._call("POST", "/flush_cache")
        except Refused:  # a request is running
            return False
        return True

    async def update_weights(self, folder: Path, label: str, *, flush: bool) -> None:
        """Load `folder`. Raises `Refused`, after which the weights may be of neither version."""
        # abort_all_requests is named because SGLang's default for it differs from call to call.
        body = {
            "model_path": _absolute(folder),
            "weight_version": label,
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        await self._call("POST", "/update_weights_from_disk", body, seconds=_LOAD_SECONDS)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call an endpoint that loads weights without a disk."""
        return await self._call("POST", path, body, seconds=_LOAD_SECONDS)

    async def release_memory(self) -> None:
        """Release weights and cache; an engine that is not idle crashes."""
        await self._call("POST", "/release_memory_occupation", {}, seconds=_LOAD_SECONDS)

    async def resume_memory(self) -> None:
        """Take the memory back; its content is undefined until weights are loaded."""
        await self._call("POST", "/resume_memory_occupation", {}, seconds=_LOAD_SECONDS)

    async def close(self) -> None:
        await self._session.close()

    async def _call(
        self, method: str, path: str, body: object = None, seconds: float | None = None
    ) -> dict[str, Any]:
        async with self._session.request(
            method,
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers=_JSON,
            timeout=aiohttp.ClientTimeout(total=seconds or self._control_seconds),
        ) as response:
            text = await response.text()
        if response.status != 200:
            raise Refused(path, response.status, text)
        answer = json.loads(text) if text.startswith("{") else {}
        assert isinstance(answer, dict)
        return answer


def _absolute(folder: Path) -> str:
    return str(folder.absolute())
