"""SGLang as one would call it without seamflow: streamed over HTTP, nothing recorded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

OnTokens = Callable[[int, object], None]
"""Told of each message: how many tokens it brought, and the weight version of the last one."""
TurnOf = Callable[[Sequence[int], int, OnTokens], Awaitable[None]]
"""Samples a turn after a prompt, with so many tokens."""


class RawSGLang:
    """One client of the server at `url`; use `async with`."""

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[TurnOf]:
        """Nothing has to be opened for an agent."""
        yield self._turn

    async def _turn(self, prompt: Sequence[int], max_new_tokens: int, on_tokens: OnTokens) -> None:
        body = {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": 1.0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "stream": True,
        }
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    message = json.loads(line[len(b"data: ") :])
                    on_tokens(_num_tokens(message), message["meta_info"]["weight_version"])

    async def update_weights(self, folder: Path, version: str) -> None:
        """What an update takes at the least: hold what runs, load, go on."""
        await self._call("/pause_generation", {"mode": "retract"})
        await self._call("/flush_cache", {})
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        await self._call("/update_weights_from_disk", body)
        await self._call("/continue_generation", {})

    async def _call(self, path: str, body: Mapping[str, Any]) -> None:
        async with self._session.post(self._url + path, json=body) as response:
            response.raise_for_status()
            await response.read()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()


def _num_tokens(message: Mapping[str, Any]) -> int:
    num_tokens = len(message["output_ids"])
    if num_tokens != len(message["meta_info"]["output_token_logprobs"]):
        raise ValueError(f"SGLang sent another number of log-probs than tokens: {message}")
    return num_tokens
