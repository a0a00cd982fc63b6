"""The routes of the API: they read requests, and write what views give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from aiohttp import web
from seamflow.durations import seconds_of
from seamflow.errors import SeamflowError
from seamflow.inspect.snapshot import Snapshot

from services.console.api_error import ApiError
from services.console.config import ConsoleConfig
from services.console.feed import RunFeed
from services.console.sources.arrivals import reported_arrivals
from services.console.sources.run_state import RunState
from services.console.sources.run_store import RunStore, RunStores
from services.console.sources.shown_run import ShownRun
from services.console.sources.shown_runs import ShownRuns
from services.console.views.nodes import chrome_trace, ended_history, node_history
from services.console.views.overview import overview, run_row
from services.console.views.rollouts import rollouts, search_of
from services.console.views.step_detail import step_detail
from services.console.views.steps import step_curves
from services.console.views.token_window import MAX_TOKENS, token_window
from services.console.views.transcript import transcript

POLL_SECONDS = 1.0
"""Time between two looks at the services while a page is open; none is open: they are left
alone."""
_MAX_PAGES = 64
"""Pages that may follow a run at once; further ones are refused with status 429."""

_PING_SECONDS = 15.0


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
            web.get(f"{run}/steps/{{step:\\d+}}", self.step),
            web.get(f"{run}/rollouts", self.rollouts),
            web.get(f"{rollout}/tokens", self.tokens),
            web.get(rollout, self.rollout),
            web.get(f"{run}/nodes", self.nodes),
            web.get(f"{run}/nodes/trace.json", self.trace),
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
        """All runs, the own one first."""
        runs = self._runs.all()
        snapshots = await asyncio.gather(*(self._snapshot(run) for run in runs))
        rows = [run_row(run, snapshot) for run, snapshot in zip(runs, snapshots, strict=True)]
        return web.json_response({"runs": rows})

    async def overview(self, request: web.Request) -> web.Response:
        """The first screen."""
        run = self._run(request)
        snapshot = await self._snapshot(run)
        causes = self._states[run.run_id].causes if run.is_live else []
        return web.json_response(overview(run, snapshot, causes))

    async def steps(self, request: web.Request) -> web.Response:
        """Curves."""
        run = self._run(request)
        names = [name for name in request.query.get("names", "").split(",") if name]
        since = _number(request, "since", 0)
        return web.json_response(step_curves(run, await self._snapshot(run), names, since))

    async def step(self, request: web.Request) -> web.Response:
        """One step with its groups."""
        run, number = self._run(request), int(request.match_info["step"])
        return web.json_response(await step_detail(await self._store(run), run.steps, number))

    async def rollouts(self, request: web.Request) -> web.Response:
        """A page of a list."""
        store = await self._store(self._run(request))
        return web.json_response(await rollouts(store, search_of(request.query)))

    async def rollout(self, request: web.Request) -> web.Response:
        """One rollout with its text."""
        store = await self._store(self._run(request))
        return web.json_response(await transcript(store, request.match_info["rollout"]))

    async def tokens(self, request: web.Request) -> web.Response:
        """Single tokens of a turn."""
        store = await self._store(self._run(request))
        start = max(_number(request, "start", 0), 0)
        count = min(max(_number(request, "count", 256), 1), MAX_TOKENS)
        turn, rollout = request.query.get("turn", ""), request.match_info["rollout"]
        return web.json_response(await token_window(store, rollout, turn, start, count))

    async def nodes(self, request: web.Request) -> web.Response:
        """What nodes were at work on."""
        return web.json_response(await self._node_history(self._run(request)))

    async def trace(self, request: web.Request) -> web.Response:
        """The same as a file for Perfetto."""
        run = self._run(request)
        name = f'attachment; filename="{run.run_id}-nodes.json"'
        trace = chrome_trace(await self._node_history(run))
        return web.json_response(trace, headers={"Content-Disposition": name})

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
            return node_history(events, arrivals, max(snapshot.now, newest))
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
