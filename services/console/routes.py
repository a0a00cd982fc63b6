"""The routes of the API, and the feed of events to open pages; views give what is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
from aiohttp import web
from seamflow.durations import seconds_of
from seamflow.errors import SeamflowError
from seamflow.inspect.snapshot import Snapshot
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.waits import in_background

from services.chassis.log import get_logger
from services.console.api_error import ApiError
from services.console.config import ConsoleConfig
from services.console.sources.run_state import RunState
from services.console.sources.run_store import RunStore, RunStores
from services.console.sources.shown_runs import ShownRun, ShownRuns
from services.console.views.logs import last_lines, logs
from services.console.views.nodes import (
    chrome_trace,
    ended_history,
    node_history,
    reported_arrivals,
)
from services.console.views.overview import overview, run_row, step_curves
from services.console.views.rollouts import rollouts, search_of
from services.console.views.rows import rollout_row
from services.console.views.step_detail import step_detail
from services.console.views.token_window import MAX_TOKENS, token_window
from services.console.views.transcript import transcript

POLL_SECONDS = 1.0
"""Time between two looks at the services while a page is open; none is open: they are left
alone."""
_MAX_PAGES = 64
"""Pages that may follow a run at once; further ones are refused with status 429."""

_PING_SECONDS = 15.0

_NEWEST = 20
_QUEUED = 256
"""Events that may wait for a page; one that does not take them is let go, and comes again."""
_log = get_logger()


class Routes:
    """Answers requests for the runs that are shown."""

    def __init__(self, config: ConsoleConfig, runs: ShownRuns) -> None:
        self._config = config
        self._runs = runs
        self._stores = RunStores()
        self._states: dict[str, RunState] = {}
        self._feeds: dict[str, RunFeed] = {}
        self._history: tuple[RunStore, dict[str, Any]] | None = None
        """Of nodes of the ended run that was looked at last: it never changes."""
        self._closing = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        """Of the API. Names of rollouts may have slashes."""
        run = "/api/runs/{run}"
        rollout = f"{run}/rollouts/{{rollout:.+}}"
        return [
            web.get("/api/runs", self.runs),
            web.get(f"{run}/overview", self.overview),
            web.get(f"{run}/steps", self.steps),
            web.get(f"{run}/steps/{{step:\\d{{1,18}}}}", self.step),
            web.get(f"{run}/rollouts", self.rollouts),
            web.get(f"{rollout}/tokens", self.tokens),
            web.get(rollout, self.rollout),
            web.get(f"{run}/nodes", self.nodes),
            web.get(f"{run}/nodes/trace.json", self.trace),
            web.get(f"{run}/logs", self.logs),
            web.get(f"{run}/logs/{{log}}", self.log),
            web.get(f"{run}/events", self.events),
        ]

    async def warm(self) -> None:
        """Open the store of a finished run ahead of the first request."""
        own = self._runs.all()[0]
        if not own.is_live:
            with suppress(SeamflowError):  # the request that needs it gets the error
                await self._store(own)

    async def close(self) -> None:
        """Let all pages go and end what was started for finished runs."""
        self._closing.set()
        for feed in self._feeds.values():
            await feed.close()
        for state in self._states.values():
            await state.close()
        await self._stores.close()

    async def runs(self, _: web.Request) -> web.Response:
        runs = self._runs.all()
        snapshots = await asyncio.gather(*(self._snapshot(run) for run in runs))
        rows = [run_row(run, snapshot) for run, snapshot in zip(runs, snapshots, strict=True)]
        return web.json_response({"runs": rows})

    async def overview(self, request: web.Request) -> web.Response:
        run = self._run(request)
        snapshot = await self._snapshot(run)
        causes = self._states[run.run_id].causes if run.is_live else []
        return web.json_response(overview(run, snapshot, causes))

    async def steps(self, request: web.Request) -> web.Response:
        run = self._run(request)
        names = [name for name in request.query.get("names", "").split(",") if name]
        since = _number(request, "since", 0)
        return web.json_response(step_curves(run, await self._snapshot(run), names, since))

    async def step(self, request: web.Request) -> web.Response:
        run, number = self._run(request), int(request.match_info["step"])
        return web.json_response(await step_detail(await self._store(run), run.steps, number))

    async def rollouts(self, request: web.Request) -> web.Response:
        store = await self._store(self._run(request))
        return web.json_response(await rollouts(store, search_of(request.query)))

    async def rollout(self, request: web.Request) -> web.Response:
        store = await self._store(self._run(request))
        return web.json_response(await transcript(store, request.match_info["rollout"]))

    async def tokens(self, request: web.Request) -> web.Response:
        store = await self._store(self._run(request))
        start = max(_number(request, "start", 0), 0)
        count = min(max(_number(request, "count", 256), 1), MAX_TOKENS)
        turn, rollout = request.query.get("turn", ""), request.match_info["rollout"]
        return web.json_response(await token_window(store, rollout, turn, start, count))

    async def nodes(self, request: web.Request) -> web.Response:
        return web.json_response(await self._node_history(self._run(request)))

    async def trace(self, request: web.Request) -> web.Response:
        """The same as a file for Perfetto."""
        run = self._run(request)
        name = f'attachment; filename="{run.run_id}-nodes.json"'
        trace = chrome_trace(await self._node_history(run))
        return web.json_response(trace, headers={"Content-Disposition": name})

    async def logs(self, request: web.Request) -> web.Response:
        return web.json_response({"logs": logs(self._run(request).folder)})

    async def log(self, request: web.Request) -> web.Response:
        """The end of a log, as plain text."""
        folder, name = self._run(request).folder, request.match_info["log"]
        return web.Response(text=await asyncio.to_thread(last_lines, folder, name))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream the run's events until the page is closed; a finished run has none."""
        run = self._run(request)
        if sum(feed.num_pages for feed in self._feeds.values()) >= _MAX_PAGES:
            raise ApiError(429, f"{_MAX_PAGES} pages follow runs", "close one")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"retry: 2000\n\n")
        async for text in self._told(run):
            await response.write(text.encode())
        return response

    async def _told(self, run: ShownRun) -> AsyncIterator[str]:
        """Texts of the event stream; a comment now and then shows that it lives."""
        if not run.is_live:
            while not self._closing.is_set():
                yield ": finished\n\n"
                await self._pause()
            return
        async with (await self._feed(run)).followed() as queue:
            while not self._closing.is_set():
                try:
                    async with asyncio.timeout(_PING_SECONDS):
                        text = await queue.get()
                except TimeoutError:
                    text = ": ping\n\n"
                if text is None:
                    return
                yield text

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_PING_SECONDS):
                await self._closing.wait()
        except TimeoutError:
            return

    def _run(self, request: web.Request) -> ShownRun:
        run = self._runs.get(request.match_info["run"])
        run.steps.read()
        return run

    async def _store(self, run: ShownRun) -> RunStore:
        return await self._stores.of(run)

    async def _state(self, run: ShownRun) -> RunState:
        known = self._states.get(run.run_id)
        if known is None or known.run is not run:
            store = await self._store(run)
            if known is not None:
                await known.close()
            known = RunState(run, store, POLL_SECONDS)
            self._states[run.run_id] = known
        return known

    async def _snapshot(self, run: ShownRun) -> Snapshot:
        return await (await self._state(run)).snapshot() if run.is_live else Snapshot()

    async def _feed(self, run: ShownRun) -> RunFeed:
        state = await self._state(run)
        known = self._feeds.get(run.run_id)
        if known is None or known.state is not state:
            if known is not None:
                await known.close()
            known = RunFeed(state, await self._store(run), POLL_SECONDS)
            self._feeds[run.run_id] = known
        return known

    async def _node_history(self, run: ShownRun) -> dict[str, Any]:
        if run.is_live:
            state = await self._state(run)
            snapshot, events = await state.snapshot(), await state.events()
            newest = seconds_of(events[-1].event_time) if events else 0.0
            arrivals = reported_arrivals(snapshot.servers)
            return node_history(events, arrivals, max(snapshot.now, newest), run.stops())
        store = await self._store(run)
        if self._history is None or self._history[0] is not store:
            self._history = (store, await ended_history(store, run))
        return self._history[1]


def _number(request: web.Request, name: str, default: int) -> int:
    """A whole number of the query. Raises `ApiError` for what is none."""
    text = request.query.get(name, "")
    if not text:
        return default
    if not text.lstrip("-").isdecimal() or len(text) > 15:
        raise ApiError(400, f"{name} is {text[:50]!r}, no whole number", "correct the link")
    return int(text)


class RunFeed:
    """Looks at a run every `seconds` while pages follow, and tells all of them what is new."""

    def __init__(self, state: RunState, store: RunStore, seconds: float) -> None:
        self.state = state
        self._store = store
        self._seconds = seconds
        self._pages: set[asyncio.Queue[str | None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._step = 0
        self._rollouts: set[str] = set()
        self._status = ""

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[asyncio.Queue[str | None]]:
        """Events as text of the event stream, within the block; None: come again."""
        queue: asyncio.Queue[str | None] = asyncio.Queue(_QUEUED)
        self._pages.add(queue)
        if self._looking is None or self._looking.done():
            self._status = ""
            self._looking = in_background(self._look(), "sending events to pages")
        elif self._status:
            queue.put_nowait(self._status)
        try:
            yield queue
        finally:
            self._pages.discard(queue)
            if not self._pages:
                await self.close()

    async def close(self) -> None:
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
