"""An emulated engine for the real rollout server, which takes `build` for a plug-in.

It computes nothing. How long everything takes is the latency model's; what it says is one token,
over and over, as many times as the prompt asks for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.sim.clock import Clock
from bench.sim.costs import Costs, load_costs
from bench.sim.emulation.prompts import ANSWER, VOCABULARY, Emulation, work
from bench.sim.simulator.decoding import Work
from bench.sim.simulator.engine_loop import EngineLoop
from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import (
    Chunk,
    EngineFailed,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    EngineStateError,
    FinishReason,
    PauseMode,
    WeightsError,
    check_request,
)

_NOTE_SECONDS = 1.0
"""Of this machine: how often it is written down what the engine did."""
_FLUSH_SECONDS = 30.0
"""Emulated: how often running turns send what they have."""


@dataclass(slots=True, eq=False)
class _Sequence:
    work: Work
    sent: int
    """Recorded tokens that were handed out, those of the prefix included."""
    chunks: asyncio.Queue[Chunk | EngineFailed] = field(default_factory=asyncio.Queue)


class EmulatedEngine:
    """The engine of one emulated node."""

    def __init__(
        self, costs: Costs, emulation: Emulation, max_running: int, busy_file: Path | None = None
    ) -> None:
        """Nothing runs before `start`.

        `busy_file` gets JSON lines: {"time": seconds since 1970, "decode": emulated seconds,
        "prefill": ..., "repeated_prefill": ..., "switching": ...}.
        """
        self._busy_file = busy_file
        self._costs, self._emulation = costs, emulation
        self._info = EngineInfo(
            name="emulated",
            vocab_size=VOCABULARY,
            eos_token_ids=(0,),
            max_context=1 << 20,
            max_running=max_running,
            features=frozenset({"release_memory"}),
        )
        self._sequences: dict[_Sequence, asyncio.Task[None]] = {}
        self._paused: PauseMode | None = None
        self._released = False
        self._weight_version = 0
        self._switching = 0.0
        self._background: list[asyncio.Task[None]] = []

    @property
    def info(self) -> EngineInfo:
        """Constants of this engine."""
        return self._info

    @property
    def weight_version(self) -> int:
        """The version in use."""
        return self._weight_version

    async def start(self) -> None:
        """Begin to serve."""
        self._failed: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        self._clock = Clock(self._emulation.speed)
        self._loop = EngineLoop(self._costs.engine, self._info.max_running, self._clock)
        self._background = [asyncio.create_task(self._flush_forever())]
        if self._busy_file is not None:
            self._background.append(asyncio.create_task(self._note_forever(self._busy_file)))

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Stream one sequence; closing the iterator ends it."""
        check_request(request, self._info)
        if not self._background:
            raise EngineStateError("generate: the engine is not started")
        if self._failed.done():
            raise self._failed.result()
        asked = work(request.token_ids, self._emulation.thinning)
        sequence = _Sequence(asked, sent=asked.sampled // self._emulation.thinning)
        self._sequences[sequence] = asyncio.create_task(self._end(sequence))
        try:
            while True:
                chunk = await sequence.chunks.get()
                if isinstance(chunk, EngineFailed):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._forget(sequence)

    async def _end(self, sequence: _Sequence) -> None:
        if self._paused is PauseMode.ABORT:
            self._flush(sequence, FinishReason.INTERRUPTED)
            return
        whole = await self._loop.submit(sequence.work)
        self._flush(sequence, FinishReason.STOP if whole else FinishReason.INTERRUPTED)

    def _forget(self, sequence: _Sequence) -> None:
        self._sequences.pop(sequence).cancel()
        self._loop.cancel(sequence.work)

    def _flush(self, sequence: _Sequence, finish: FinishReason | None) -> None:
        have = sequence.work.sampled // self._emulation.thinning
        new = have - sequence.sent
        sequence.sent = have
        if new or finish is not None:
            chunk = Chunk(
                token_ids=(ANSWER,) * new,
                logprobs=(-1.0,) * new,
                weight_version=self._weight_version,
                finish=finish,
            )
            sequence.chunks.put_nowait(chunk)

    def _flush_all(self) -> None:
        self._loop.update()
        for sequence in self._sequences:
            self._flush(sequence, None)

    async def _flush_forever(self) -> None:
        while True:
            await self._clock.sleep(_FLUSH_SECONDS)
            self._flush_all()

    async def _note_forever(self, busy_file: Path) -> None:
        while True:
            await asyncio.sleep(_NOTE_SECONDS)
            busy = asdict(self._loop.update())
            line = {"time": time.time(), **busy, "switching": self._switching}
            with busy_file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary."""
        self._flush_all()
        self._loop.hold()
        self._paused = mode
        if mode is PauseMode.ABORT:
            self._loop.give_up()
            await asyncio.gather(*self._sequences.values(), return_exceptions=True)

    async def resume(self) -> None:
        """Go on after `pause`."""
        if self._released:
            raise EngineStateError("resume: memory is released, restore it first")
        if self._paused is not None:
            self._paused = None
            self._loop.go_on()

    async def prepare_weights(self, folder: Path) -> None:
        """Check that the folder exists; fetching overlaps with sampling and costs nothing."""
        if not folder.is_dir():  # noqa: ASYNC240 -- one stat
            raise WeightsError(f"{folder}: no such folder")

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        """Take as long as an update takes, and its version."""
        self._require_paused("update_weights")
        await self.prepare_weights(folder)
        await self._switch(self._costs.engine.update_seconds)
        self._weight_version = weight_version

    async def release_memory(self) -> int:
        """Take as long as giving the device back takes."""
        self._require_paused("release_memory")
        if not self._released:
            self._released = True
            await self._switch(self._costs.switching.deactivate_seconds)
        return 0

    async def restore_memory(self, folder: Path | None = None, weight_version: int = 0) -> None:
        """Take as long as taking the device takes, and as an update to other weights takes."""
        if folder is not None:
            await self.update_weights(folder, weight_version)
        if self._released:
            await self._switch(self._costs.switching.activate_seconds)
            self._released = False

    async def _switch(self, seconds: float) -> None:
        began = self._clock.now()
        await self._clock.sleep(seconds)
        self._switching += self._clock.now() - began

    def _require_paused(self, call: str) -> None:
        if self._paused is None:
            raise EngineStateError(f"{call}: the engine is running, pause it first")

    def load(self) -> EngineLoad:
        """How busy the engine is now."""
        return EngineLoad(
            running=self._loop.num_running,
            queued=self._loop.num_queued,
            tokens_per_second=self._loop.tokens_per_second
            * self._emulation.speed
            / self._emulation.thinning,
        )

    async def wait_failed(self) -> None:
        """Raise `EngineFailed` once the engine was given up."""
        if not self._background:
            raise EngineStateError("wait_failed: the engine is not started")
        raise await asyncio.shield(self._failed)

    def fail(self, why: str) -> None:
        """End every sequence."""
        if not self._failed.done():
            failed = EngineFailed(why)
            self._failed.set_result(failed)
            for sequence in self._sequences:
                sequence.chunks.put_nowait(failed)

    async def close(self) -> None:
        """End every sequence and stop."""
        if self._background:
            await self.pause(PauseMode.ABORT)
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)


def build(config: RolloutServerConfig) -> EmulatedEngine:
    """Make the engine a configuration asks for."""
    if config.model is None:
        raise ValueError("model is not set: give the folder that holds emulation.json")
    settings = json.loads((config.model / "emulation.json").read_text())
    busy_file = config.model / f"{config.server_id}.busy.jsonl"
    return EmulatedEngine(load_costs(), Emulation(**settings), config.max_running, busy_file)
