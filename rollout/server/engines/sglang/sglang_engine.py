"""SGLang as an engine: a server that we start and supervise, or a running one at a URL.

    generate ─▶ Turn ─▶ POST /generate, streamed     one request after another, until the turn ends
    pause    ─▶ no new requests, abort all, wait until each has given its last tokens
    update   ─▶ flush the prefix cache, load from disk
    resume   ─▶ held turns continue as new requests, prefilled from their tokens

SGLang's own retracting pause keeps sampled tokens that it has not streamed yet (up to
stream_interval - 1) and sends them after the update in one message with newer ones: where the
version changes, is unknown before the turn ends. So requests are ended instead. One that is
aborted answers with all its tokens: once all have answered, the engine is drained, and on that
rests the version of every chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import (
    Chunk,
    EngineError,
    EngineFailed,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    EngineStateError,
    MemoryNotReleased,
    PauseMode,
    TokenRate,
    WeightsError,
)
from rollout.server.engines.sglang import server_weights
from rollout.server.engines.sglang.command_line import check_url, command_line
from rollout.server.engines.sglang.http_client import Connection, ConnectionLost, Refused
from rollout.server.engines.sglang.model_shapes import (
    ModelFolder,
    describe,
    recorded_routing,
)
from rollout.server.engines.sglang.server_process import ServerLifetime, SGLangProcess
from rollout.server.engines.sglang.server_weights import ServerWeights, WeightWay
from rollout.server.engines.sglang.sglang_turn import Turn, Weights, check_sampled
from services.lib.routed_experts import RoutingShape

T = TypeVar("T")

_START_SECONDS = 1800.0
_WATCH_SECONDS = 2.0


class SGLangEngine:
    """Drives one SGLang server, which must serve no other client."""

    def __init__(
        self, config: RolloutServerConfig, used_bytes: server_weights.UsedBytes | None = None
    ) -> None:
        """Nothing is started before `start`.

        Args:
            config: of the rollout server; `sglang_url` names a server that runs already.
            used_bytes: measures what is in use on its devices; None: by nvidia-smi, if it is
                started here.

        Raises:
            ValueError: there is no usable model, or a field or flag that is not the user's to set.
        """
        if config.model is None:
            raise ValueError("model is not set: give the Hugging Face folder the run starts from")
        if config.sglang_url is not None:
            check_url(config)
        self._config, self._model = config, ModelFolder(config.model)
        self._command = command_line(config)
        self._way = WeightWay(
            broadcast_host=config.sglang_broadcast_host,
            by_tensors=config.sglang_weights == "tensors",
        )
        is_here = config.sglang_url is None
        here = server_weights.used_bytes if is_here else server_weights.on_another_host
        self._used_bytes = used_bytes or here
        self._routing: RoutingShape | None = None
        self._info: EngineInfo | None = None
        self._begun: ServerLifetime | None = None
        self._rate = TokenRate()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turns: set[Turn] = set()

    async def start(self) -> None:
        """Start or take over the server, at version 0; may be called again after a failure.

        Raises `ValueError` if it cannot start, or refuses its flags.
        """
        await self._stop()
        try:
            async with asyncio.timeout(_START_SECONDS):
                if self._config.sglang_url is None:
                    await self._launch()
                else:
                    await self._take_over(self._config.sglang_url)
                server = await self._life.connection.server_info()
                self._info = describe(self._model, server)
                if self._config.record_routed_experts:
                    self._routing = recorded_routing(self._model, server)
                    features = self._info.features | {"routed_experts"}
                    self._info = replace(self._info, features=features)
                if self._config.lends_device:
                    server_weights.require_memory_saver(server)
        except TimeoutError:
            raise ValueError(f"SGLang did not start in {_START_SECONDS:.0f} seconds") from None
        except MemoryNotReleased as error:
            raise ValueError(str(error)) from error
        self._life.open.set()
        self._spawn(self._watch(self._life))

    async def _launch(self) -> None:
        process = await SGLangProcess.start(self._command)
        weights = Weights(0, process.label, self._model.folder)
        self._begin(ServerLifetime(self._connect(process.url), weights, process))
        await process.until_ready(self._life.connection)

    async def _take_over(self, url: str) -> None:
        self._begin(ServerLifetime(self._connect(url), Weights(0, "0", self._model.folder)))
        await self._life.connection.until_there()
        # A previous client may have left it paused, with requests, and with any weights.
        await self._life.call(self._life.connection.go_on())
        await self._weights.flush(abort=True)
        try:
            await self._weights.load(self._life.weights, flush=True)
        except (Refused, WeightsError) as error:
            cure = "it must see model at the same path, or set sglang_broadcast_host"
            raise ValueError(f"sglang_url: {error}; {cure}") from error

    def _connect(self, url: str) -> Connection:
        return Connection(url, control_seconds=self._config.sglang_control_seconds)

    def _begin(self, life: ServerLifetime) -> None:
        self._begun = life
        self._weights = ServerWeights(
            life,
            self._model,
            way=self._way,
            drain_seconds=self._config.sglang_drain_seconds,
            used_bytes=self._used_bytes,
        )
        life.failed.add_done_callback(self._fail_turns)

    def _fail_turns(self, failed: asyncio.Future[EngineFailed]) -> None:
        for turn in self._turns:
            turn.fail(failed.result())

    async def _watch(self, life: ServerLifetime) -> None:
        """Fail once the server has exited."""
        if life.process is not None:
            life.fail(await life.process.wait())
        while not life.failed.done():
            await asyncio.sleep(_WATCH_SECONDS)
            with contextlib.suppress(EngineError):
                await life.call(life.connection.model_info())

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineStateError("info: the engine is not started")
        return self._info

    @property
    def weight_version(self) -> int:
        return self._life.weights.version

    @property
    def _life(self) -> ServerLifetime:
        if self._begun is None:
            raise EngineStateError("the engine is not started")
        return self._begun

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Stream one sequence; closing the iterator aborts its request."""
        self._check(request)
        turn = Turn(request, self.info, self._life.weights, self._routing)
        if self._life.paused is PauseMode.ABORT:
            turn.interrupt()
            yield await turn.next_chunk()
            return
        self._turns.add(turn)
        task = self._spawn(self._run(turn))
        try:
            while True:
                chunk = await turn.next_chunk()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._turns.discard(turn)
            self._give_up(turn, task)

    def _check(self, request: EngineRequest) -> None:
        check_sampled(request, self.info)
        if self._life.failed.done():
            raise self._life.failed.result()
        if self._life.paused is None and not self._life.open.is_set():
            raise EngineFailed("SGLang is starting again")

    async def _run(self, turn: Turn) -> None:
        """Run a turn: one request after another, each between two pauses."""
        try:
            while not turn.ended:
                # Checked again after waking: a pause may have come between resume and this turn.
                while not self._life.open.is_set():
                    await self._life.open.wait()
                await self._request(turn)
                if self._life.paused in (None, PauseMode.ABORT):
                    turn.interrupt()
        except ConnectionLost as error:
            turn.fail(
                self._life.fail(f"SGLang was lost in mid-turn: {error or type(error).__name__}")
            )
        except EngineFailed as error:
            turn.fail(self._life.fail(str(error)))
        except EngineError as error:
            turn.fail(error)
        except Exception as error:
            turn.fail(self._life.fail(f"SGLang's answer makes no sense: {error!r}"))

    async def _request(self, turn: Turn) -> None:
        def receive(message: dict[str, Any]) -> None:
            self._rate.add(turn.receive(message))
            # Repeated with each message: SGLang ignores an abort of a request it has not seen yet.
            if turn.ended and not message.get("meta_info", {}).get("finish_reason"):
                self._abort(turn)

        body = turn.request(self._life.weights)
        self._life.running += 1
        self._life.idle.clear()
        try:
            await self._life.connection.generate(body, receive)
        finally:
            turn.rid = None
            self._life.running -= 1
            if not self._life.running:
                self._life.idle.set()

    def _give_up(self, turn: Turn, task: asyncio.Task[None]) -> None:
        """End a turn without a reader; its request counts as running until SGLang ends it."""
        turn.ended = True
        if turn.rid is None:
            task.cancel()
        else:
            self._abort(turn)

    def _abort(self, turn: Turn) -> None:
        if turn.rid is not None:
            self._spawn(self._abort_request(turn.rid))

    async def _abort_request(self, rid: str) -> None:
        with contextlib.suppress(EngineError):
            await self._life.call(self._life.connection.abort(rid))

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary; every sampled token has been handed out, but in place."""
        if self._life.paused is PauseMode.IN_PLACE and mode is not PauseMode.IN_PLACE:
            # A request that is paused in place does not end before it is resumed.
            await self._life.call(self._life.connection.go_on())
        self._life.paused = mode
        self._life.open.clear()
        if mode is PauseMode.IN_PLACE:
            await self._life.call(self._life.connection.pause_in_place())
            return
        await self._life.drain(self._config.sglang_drain_seconds)
        if mode is PauseMode.ABORT:
            for turn in self._turns:
                turn.interrupt()

    async def resume(self) -> None:
        if self._life.released:
            raise EngineStateError("resume: memory is released, restore it first")
        if self._life.paused is PauseMode.IN_PLACE:
            await self._life.call(self._life.connection.go_on())
        self._life.paused = None
        self._life.open.set()

    async def prepare_weights(self, folder: Path) -> None:
        """Check `folder` against the model and bring its files into the page cache."""
        await asyncio.to_thread(self._model.check, folder)

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        """Load `folder` from disk; nothing computed by old weights is kept, but in place."""
        self._require_paused("update_weights")
        await self.prepare_weights(folder)
        if self._life.paused is PauseMode.IN_PLACE:
            for turn in self._turns:
                turn.hold()
        await self._weights.update(Weights(weight_version, str(weight_version), folder))

    async def release_memory(self) -> int:
        """Give weights and cache back; needs a pause. Raises `MemoryNotReleased`, and undoes it."""
        self._require_paused("release_memory")
        if self._life.running:
            raise EngineStateError("release_memory: turns are paused in place, pause with RETRACT")
        if self._life.released:
            return 0
        return await self._weights.release()

    async def restore_memory(self, folder: Path | None = None, weight_version: int = 0) -> None:
        """Take the memory back, with the weights of `folder`, else the last; it stays paused."""
        if folder is None:
            weights = self._life.weights
        else:
            await self.prepare_weights(folder)
            weights = Weights(weight_version, str(weight_version), folder)
        if self._life.released:
            await self._weights.restore(weights)
        elif folder is not None:
            await self.update_weights(folder, weight_version)

    def load(self) -> EngineLoad:
        running = 0 if self._life.paused else min(self._life.running, self.info.max_running)
        return EngineLoad(
            running=running,
            queued=max(self._life.running, len(self._turns)) - running,
            tokens_per_second=self._rate.per_second(),
        )

    async def wait_failed(self) -> None:
        raise await asyncio.shield(self._life.failed)

    def fail(self, why: str) -> None:
        """End every sequence, and the server, if it is ours."""
        self._life.fail(why)

    async def close(self) -> None:
        """End every sequence `INTERRUPTED` and stop the server, if it is ours."""
        try:
            if self._begun is not None and not self._begun.failed.done():
                with contextlib.suppress(EngineError):
                    await self.pause(PauseMode.ABORT)
        finally:
            for turn in self._turns:
                turn.interrupt()
            await self._stop()

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._begun is not None:
            await self._begun.end()

    def _require_paused(self, call: str) -> None:
        if self._life.paused is None:
            raise EngineStateError(f"{call}: the engine is running, pause it first")

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
