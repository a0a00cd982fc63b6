"""Events of a run for the open pages; without an open page no service is called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
from seamflow.errors import SeamflowError
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.log import get_logger
from services.console.sources.run_state import RunState
from services.console.sources.run_store import RunStore
from services.console.views.overview import overview
from services.console.views.rows import rollout_row

_NEWEST = 20
_QUEUED = 256
"""Events that may wait for a page; one that does not take them is let go, and comes again."""
_log = get_logger()


class RunFeed:
    """Looks at a run every `seconds` while pages follow, and tells all of them what is new."""

    def __init__(self, state: RunState, store: RunStore, seconds: float) -> None:
        self.state = state
        """Of the run."""
        self._store = store
        self._seconds = seconds
        self._pages: set[asyncio.Queue[str | None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._step = 0
        self._rollouts: set[str] = set()
        self._status = ""

    @property
    def num_pages(self) -> int:
        """Pages that follow."""
        return len(self._pages)

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[asyncio.Queue[str | None]]:
        """Events as text of the event stream, within the block; None: come again."""
        queue: asyncio.Queue[str | None] = asyncio.Queue(_QUEUED)
        self._pages.add(queue)
        if self._looking is None or self._looking.done():
            self._status = ""
            self._looking = asyncio.create_task(self._look())
        elif self._status:
            queue.put_nowait(self._status)
        try:
            yield queue
        finally:
            self._pages.discard(queue)
            if not self._pages:
                await self.close()

    async def close(self) -> None:
        """Look no more, and let the pages go."""
        for page in list(self._pages):
            self._dismiss(page)
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking
            self._looking = None

    async def _look(self) -> None:
        table = self.state.run.steps
        table.read()
        self._step = table.steps[-1] if table.steps else 0
        self._rollouts = {row["rollout_id"] for row in await self._closed()}
        while True:
            try:
                await self._look_once()
            except (SeamflowError, grpc.aio.AioRpcError) as error:
                _log.info("run_does_not_answer", detail=str(error))
            await asyncio.sleep(self._seconds)

    async def _look_once(self) -> None:
        snapshot = await self.state.snapshot()
        table = self.state.run.steps
        table.read()
        for step in [each for each in table.steps[-100:] if each > self._step]:
            self._tell("step", {"step": step, "metrics": table.row(step)})
        self._step = table.steps[-1] if table.steps else 0
        shown = overview(self.state.run, snapshot, self.state.causes)
        status = _event("status", {k: v for k, v in shown.items() if k != "now"})
        if status != self._status:
            self._status = status
            self._send(status)
        rows = await self._closed()
        for row in reversed([row for row in rows if row["rollout_id"] not in self._rollouts]):
            self._tell("rollout", row)
        self._rollouts = {row["rollout_id"] for row in rows} | self._rollouts
        if len(self._rollouts) > 50 * _NEWEST:
            self._rollouts = {row["rollout_id"] for row in rows}

    async def _closed(self) -> list[dict[str, Any]]:
        """The newest rollouts that have ended."""
        with suppress(SeamflowError, grpc.aio.AioRpcError):
            found = await self._store.found(pb.SearchRolloutsRequest(page_size=_NEWEST))
            rows = [rollout_row(each) for each in found.rollouts]
            return [row for row in rows if row["state"] != "running"]
        return []

    def _tell(self, kind: str, values: dict[str, Any]) -> None:
        self._send(_event(kind, values))

    def _send(self, text: str) -> None:
        for page in list(self._pages):
            if page.full():
                self._dismiss(page)
            else:
                page.put_nowait(text)

    def _dismiss(self, page: asyncio.Queue[str | None]) -> None:
        self._pages.discard(page)
        if page.full():
            page.get_nowait()
        page.put_nowait(None)


def _event(kind: str, values: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(values)}\n\n"
