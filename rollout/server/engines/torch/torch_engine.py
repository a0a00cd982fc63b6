"""The embedded engine: any Hugging Face causal language model, batched continuously.

`TorchEngine` runs on the event loop; `decode_loop.Decoder` runs in a separate thread:

    generate() ──submit──▶ mailbox ──▶ Decoder.run: admit → step → flush ──▶ a queue per call
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import (
    Chunk,
    EngineFailed,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    EngineStateError,
    PauseMode,
    check_request,
)
from rollout.server.engines.torch.batch import DecodedSequence
from rollout.server.engines.torch.decode_loop import Decoder, Mailbox, SampledChunks
from rollout.server.engines.torch.transformers_model import LoadedModel, load_model
from rollout.server.engines.torch.weight_reader import ArrivingWeights
from services.lib.model_files.model_folder import check_model_folder

T = TypeVar("T")


class TorchEngine:
    """Runs a `Decoder` in a thread, sends calls to it and receives chunks from it."""

    def __init__(self, config: RolloutServerConfig) -> None:
        """Nothing is loaded before `start`. Raises `ValueError`: the model is no usable folder."""
        if config.model is None:
            raise ValueError("model is not set: give the Hugging Face folder the run starts from")
        check_model_folder(config.model)
        self._config, self._folder = config, config.model
        self._prepared: tuple[Path, Any] | None = None
        self._arriving = ArrivingWeights()
        self._chunks: dict[DecodedSequence, asyncio.Queue[Chunk | EngineFailed]] = {}
        self._decoder: Decoder | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(loop)
        self._failed: asyncio.Future[EngineFailed] = loop.create_future()
        started: asyncio.Future[Decoder] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="torch-engine", daemon=True
        )
        self._thread.start()
        self._decoder = await started

    def _run(self, started: asyncio.Future[Decoder]) -> None:
        try:
            torch.set_num_threads(self._config.threads)
            decoder = self._load()
        except Exception as error:
            self._mailbox.notify(started.set_exception, error)
            return
        self._mailbox.notify(started.set_result, decoder)
        try:
            with torch.inference_mode():
                decoder.run()
        except Exception as error:
            failed = EngineFailed(f"the torch engine failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self._mailbox.notify(self._fail, failed)

    def _load(self) -> Decoder:
        config = self._config
        model = load_model(
            self._folder,
            config.max_running,
            config.max_context,
            config.torch_dtype,
            config.torch_device,
            record_experts=config.record_routed_experts,
        )
        self._model: LoadedModel = model
        experts = ["routed_experts"] if config.record_routed_experts else []
        self._info = EngineInfo(
            name="torch",
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_context=model.max_context,
            max_running=config.max_running,
            features=frozenset({"seed", "release_memory", *experts}),
        )
        return Decoder(
            model,
            self._mailbox,
            self._deliver,
            num_slots=config.max_running,
            stream_interval=config.stream_interval,
            prefill_tokens=config.prefill_tokens,
        )

    @property
    def info(self) -> EngineInfo:
        self._started("info")
        return self._info

    @property
    def weight_version(self) -> int:
        return self._started("weight_version").weight_version

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Stream one sequence; closing the iterator ends it within one step."""
        decoder = self._started("generate")
        check_request(request, self._info)
        sequence = DecodedSequence.of(request, self._info.eos_token_ids, self._info.max_context)
        chunks: asyncio.Queue[Chunk | EngineFailed] = asyncio.Queue()
        if self._failed.done():
            raise self._failed.result()
        self._chunks[sequence] = chunks
        self._mailbox.post(lambda: decoder.submit(sequence))
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, EngineFailed):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            del self._chunks[sequence]
            self._mailbox.post(lambda: decoder.cancel(sequence))

    def _deliver(self, sampled: SampledChunks) -> None:
        self._mailbox.notify(self._receive, sampled)

    def _receive(self, sampled: SampledChunks) -> None:
        for sequence, chunk in sampled:
            chunks = self._chunks.get(sequence)
            if chunks is not None:
                chunks.put_nowait(chunk)

    def fail(self, why: str) -> None:
        """End every sequence, and the thread as soon as it comes to read of it."""
        self._mailbox.post(self._started("fail").close)
        self._fail(EngineFailed(why))

    def _fail(self, failed: EngineFailed) -> None:
        if not self._failed.done():
            self._failed.set_result(failed)
            for chunks in self._chunks.values():
                chunks.put_nowait(failed)

    def _started(self, call: str) -> Decoder:
        if self._decoder is None:
            raise EngineStateError(f"{call}: the engine is not started")
        return self._decoder

    async def pause(self, mode: PauseMode) -> None:
        decoder = self._started("pause")
        await self._call(lambda: decoder.pause(mode))

    async def resume(self) -> None:
        await self._call(self._started("resume").resume)

    async def prepare_weights(self, folder: Path) -> None:
        """Read `folder` in another thread, in the layout of a step."""
        self._started("prepare_weights")
        # Before reading: never three versions in memory.
        self._prepared = None
        self._prepared = folder, await self._read(folder)

    async def prepare_files(self, files: Sequence[Path]) -> None:
        """Read files in another thread, in the layout of a step."""
        # Never three versions in memory.
        if self._prepared is None and not self._started("prepare_files").released:
            weights = [file for file in files if file.suffix == ".safetensors"]
            await self._in_thread(lambda: self._arriving.add(self._model.rows.reader, weights))

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        """Swap in what was prepared of `folder`, or read it now. Needs a pause."""
        decoder = self._started("update_weights")
        await self._call(decoder.check_update)
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == folder:
            weights = prepared[1]
        else:
            weights = await self._read(folder)
        await self._call(lambda: decoder.update_weights(weights, weight_version))
        self._folder = folder

    async def _read(self, folder: Path) -> Any:
        def read() -> Any:
            arrived = self._arriving.take(folder)
            return self._model.rows.read_weights(folder) if arrived is None else arrived

        return await self._in_thread(read)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        def run() -> T:
            torch.set_num_threads(self._config.threads)
            return function()

        return await asyncio.to_thread(run)

    async def release_memory(self) -> int:
        """Drop weights, prepared ones too, and cache; return the bytes given back of the model."""
        released = await self._call(self._started("release_memory").release_memory)
        self._prepared = None
        self._arriving.clear()
        return released

    async def restore_memory(self, folder: Path | None = None, weight_version: int = 0) -> None:
        """Read the weights of `folder`, or the last again; the engine stays paused."""
        decoder = self._started("restore_memory")
        if decoder.released:
            version = decoder.weight_version if folder is None else weight_version
            folder = folder or self._folder
            weights = await self._read(folder)
            await self._call(lambda: decoder.restore_memory(weights, version))
            self._folder = folder
        elif folder is not None:
            await self.update_weights(folder, weight_version)

    async def _call(self, function: Callable[[], T]) -> T:
        """Have the engine's thread run `function`; raise `EngineFailed` if it dies instead."""
        call = asyncio.ensure_future(self._mailbox.call(function))
        waits: set[asyncio.Future[Any]] = {call, self._failed}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            return call.result()
        call.cancel()
        raise self._failed.result()

    def load(self) -> EngineLoad:
        return self._started("load").load()

    async def wait_failed(self) -> None:
        self._started("wait_failed")
        raise await asyncio.shield(self._failed)

    async def close(self) -> None:
        if self._decoder is None or self._failed.done():
            return
        await self._call(self._decoder.close)
        await asyncio.to_thread(self._thread.join)
        self._decoder = None
