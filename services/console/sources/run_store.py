"""What a run has recorded: calls of its trajectory manager and scheduler, and its tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
from seamflow.errors import NotFoundError
from seamflow.inspect.clients import RunClients
from seamflow.inspect.endpoints import Endpoints
from seamflow.pages import pages
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.waits import in_background

from services.console.sources.private_store import private_store
from services.console.sources.shown_runs import ShownRun
from services.console.text import TokenText, load_token_text

_MAX_EVENTS = 20_000
_FIRST_SECONDS, _QUIET_SECONDS = 1.0, 0.2
_IDLE_SECONDS = 30.0

_SECONDS = 20.0
_MAX_PRIVATE = 2
"""Finished runs whose data are served at once: each takes processes and a copy on the disk."""


class AllocationLog:
    """Its newest 20,000 events, oldest first; the feed is closed after 30 s without a request."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._events: deque[scheduler_pb.AllocationEvent] = deque(maxlen=_MAX_EVENTS)
        self._feed: asyncio.Task[None] | None = None
        self._asked = 0.0

    async def events(self) -> list[scheduler_pb.AllocationEvent]:
        """All that is known; the first call waits a moment for it."""
        self._asked = time.monotonic()
        if self._feed is None or self._feed.done():
            self._feed = in_background(self._follow(), "following the allocations")
            await self._first_events()
        return list(self._events)

    async def _first_events(self) -> None:
        """Wait until what is stored has come: the feed never ends."""
        assert self._feed is not None
        deadline, number = time.monotonic() + _FIRST_SECONDS, -1
        while time.monotonic() < deadline and not self._feed.done() and len(self._events) != number:
            number = len(self._events) or -1
            await asyncio.sleep(_QUIET_SECONDS)

    async def close(self) -> None:
        if self._feed is not None:
            self._feed.cancel()
            await asyncio.wait([self._feed])

    async def _follow(self) -> None:
        after = self._events[-1].sequence if self._events else 0
        request = scheduler_pb.WatchAllocationsRequest(
            run_id=self.store.run_id, after_sequence=after
        )
        while time.monotonic() - self._asked < _IDLE_SECONDS:
            try:
                async for response in self.store.scheduler.WatchAllocations(
                    request, timeout=_IDLE_SECONDS
                ):
                    self._events.extend(response.events)
                    request.after_sequence = self._events[-1].sequence
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    return


class RunStore(RunClients):
    """Reads what is recorded of one run."""

    def __init__(self, run_id: str, endpoints: Endpoints, text: TokenText) -> None:
        """`text`: of its model."""
        super().__init__(endpoints)
        self.run_id, self.text = run_id, text
        self.excerpts: dict[str, dict[str, Any]] = {}
        """Kept by `views.excerpts`."""

    async def headers(self, rollout_id: str) -> tuple[trajectory_pb2.Trajectory, str]:
        """A rollout with the spans of its turns, without ids and log-probs; JSON of its task.

        "": it has none, or one without a payload.
        """
        request = pb.GetTrajectoryRequest(
            run_id=self.run_id, rollout_id=rollout_id, headers_only=True, with_task=True
        )
        found = await self.trajectories.GetTrajectory(request, timeout=_SECONDS)
        return found.trajectory, found.task.payload_json.removeprefix("{}")

    async def window(
        self, rollout_id: str, turn_id: str, start: int, num_tokens: int
    ) -> pb.ReadTokensResponse:
        request = pb.ReadTokensRequest(
            run_id=self.run_id,
            rollout_id=rollout_id,
            turn_id=turn_id,
            start=start,
            num_tokens=num_tokens,
        )
        return await self.trajectories.ReadTokens(request, timeout=_SECONDS)

    async def found(self, search: pb.SearchRolloutsRequest) -> pb.SearchRolloutsResponse:
        search.run_id = self.run_id
        return await self.trajectories.SearchRollouts(search, timeout=_SECONDS)

    async def trained(
        self, step: int, rollout_ids: tuple[str, ...] = (), *, with_tokens: bool = False
    ) -> AsyncIterator[trajectory_pb2.TrainedSample]:
        """What a step trained on, by name of the samples."""
        request = sample_pb.ListTrainedSamplesRequest(
            run_id=self.run_id,
            step=step,
            rollout_ids=rollout_ids,
            with_tokens=with_tokens,
            page_size=1000,
        )
        async for page in pages(
            lambda r: self.samples.ListTrainedSamples(r, timeout=_SECONDS), request
        ):
            for sample in page.samples:
                yield sample


class RunStores:
    """The stores of runs; those of finished ones are opened when they are asked for."""

    def __init__(self) -> None:
        self._texts: dict[str, TokenText] = {}
        self._live: dict[str, RunStore] = {}
        self._private: OrderedDict[str, tuple[AsyncExitStack, RunStore]] = OrderedDict()
        self._opening: dict[str, asyncio.Task[RunStore]] = {}

    async def of(self, run: ShownRun) -> RunStore:
        """The store of a run.

        Raises:
            SeamflowError: the folder of a finished run has no data, or they cannot be served.
        """
        if run.endpoints is not None:
            known = self._live.get(run.run_id)
            if known is None or known.endpoints is not run.endpoints:
                known = RunStore(run.run_id, run.endpoints, await self._text(run.model))
                self._live[run.run_id] = known
            return known
        if run.folder is None:
            raise NotFoundError(f"run {run.run_id!r} has neither services nor a folder here")
        opening = self._opening.get(run.run_id)
        if opening is None or (opening.done() and run.run_id not in self._private):
            opening = asyncio.create_task(self._opened(run))
            self._opening[run.run_id] = opening
        # The request may have been cancelled: the next one uses the same result.
        store = await asyncio.shield(opening)
        self._private.move_to_end(run.run_id)
        return store

    async def close(self) -> None:
        """End the processes of finished runs."""
        for opening in self._opening.values():
            opening.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        while self._private:
            _, (stack, _) = self._private.popitem()
            await stack.aclose()

    async def _opened(self, run: ShownRun) -> RunStore:
        assert run.folder is not None
        while len(self._private) >= _MAX_PRIVATE:
            _, (oldest, _) = self._private.popitem(last=False)
            await oldest.aclose()
        stack = AsyncExitStack()
        endpoints = await stack.enter_async_context(private_store(run.folder, run.run_id))
        store = RunStore(run.run_id, endpoints, await self._text(run.model))
        self._private[run.run_id] = (stack, store)
        return store

    async def _text(self, model: str) -> TokenText:
        if model not in self._texts:
            self._texts[model] = await asyncio.to_thread(load_token_text, model)
        return self._texts[model]
