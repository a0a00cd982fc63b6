"""The parts of `bench/rollout/weights.py` that speak to seamflow's own classes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import REGISTRY
from seamflow.channel import connect
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from bench.harness.redis_process import FAST, free_port, redis_server
from rollout.server.cli import build as build_server
from rollout.server.config import RolloutServerConfig
from rollout.server.engines import build_engine
from rollout.server.engines.engine import PauseMode
from rollout.server.weights.transport import Incoming
from rollout.server.weights.transports import TransportContext
from rollout.server.weights.transports.shard_stream import ShardStream
from services.chassis.rpc.server import started
from services.weights.cli import build as build_weights
from services.weights.config import WeightsConfig
from trainer.publish.uploader import Uploader

RUN = "bench"
SEED = 0
RELAYS = 4
RELAY_FILES = 8
RELAY_FILE_BYTES = 4 << 20
STALLS = 7


async def publish(port: int, source: Path) -> pb.Manifest:
    """Publish a folder as the next version, as a trainer does."""
    async with connect(f"127.0.0.1:{port}") as channel:
        stub: Any = WeightServiceStub(channel)
        newest = (await stub.GetManifest(pb.GetManifestRequest(run_id=RUN))).manifest
        step = newest.weight_version + 1
        begun = await stub.BeginPublish(
            pb.BeginPublishRequest(run_id=RUN, step=step, epoch=1, request_id=str(step))
        )
        files = _described_all(source)
        head = pb.UploadShardsRequest(run_id=RUN, weight_version=begun.weight_version, epoch=1)
        await Uploader(channel).upload(head, source, files)
        request = pb.CommitPublishRequest(
            run_id=RUN, weight_version=begun.weight_version, epoch=1, files=files
        )
        committed = await stub.CommitPublish(request)
    manifest: pb.Manifest = committed.manifest
    return manifest


async def receive_shards(port: int, folder: Path) -> float:
    """Fetch the newest version into `folder` by the shard stream; seconds."""
    incoming, seconds = await _receive(port, folder)
    assert not incoming.missing
    return seconds


async def relayed_share(folder: Path) -> float:
    """Bytes the weights service sends to four servers that relay, over the size of a version."""
    source = folder / "source"
    source.mkdir(parents=True)
    rng = np.random.default_rng(SEED)
    for number in range(RELAY_FILES):
        (source / f"model-{number}.safetensors").write_bytes(rng.bytes(RELAY_FILE_BYTES))
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(_weights_service(folder / "published"))
        async with connect(f"127.0.0.1:{port}") as channel:
            stub: Any = WeightServiceStub(channel)
            # All are known before the version comes, as they are in a run.
            addresses = [f"127.0.0.1:{free_port()}" for _ in range(RELAYS)]
            for address in addresses:
                await stub.RequestSources(pb.RequestSourcesRequest(run_id=RUN, address=address))
            for address in addresses:
                await stack.enter_async_context(_fake_server(port, address))
            sent = REGISTRY.get_sample_value("seamflow_weights_served_bytes_total") or 0.0
            manifest = await publish(port, source)
            await _until(lambda: _loaded(RELAYS))
            total = REGISTRY.get_sample_value("seamflow_weights_served_bytes_total") or 0.0
    return (total - sent) / sum(file.num_bytes for file in manifest.files)


async def update_stalls(folder: Path) -> tuple[list[float], list[float]]:
    """Seconds from pause to resume of the torch engine: prepared, and not, in turns."""
    models = [_model(folder / str(seed), seed) for seed in range(2)]
    engine = build_engine(RolloutServerConfig(model=models[0]))
    await engine.start()
    prepared: list[float] = []
    unprepared: list[float] = []
    try:
        for number in range(2 * STALLS):
            target = models[(number + 1) % 2]
            samples = unprepared if number % 2 else prepared
            if samples is prepared:
                await engine.prepare_weights(target)
            started_at = time.perf_counter()
            await engine.pause(PauseMode.RETRACT)
            await engine.update_weights(target, number + 1)
            await engine.resume()
            samples.append(time.perf_counter() - started_at)
    finally:
        await engine.close()
    return prepared, unprepared


async def _receive(port: int, folder: Path) -> tuple[Incoming, float]:
    async with connect(f"127.0.0.1:{port}") as channel:
        stub: Any = WeightServiceStub(channel)
        manifest = (await stub.GetManifest(pb.GetManifestRequest(run_id=RUN))).manifest
        config = RolloutServerConfig()
        stream = ShardStream(
            TransportContext(config=config, weights=channel, connect=lambda _: channel)
        )
        incoming = Incoming(manifest, folder)
        started_at = time.perf_counter()
        await stream.fetch(incoming)
        return incoming, time.perf_counter() - started_at


@asynccontextmanager
async def _weights_service(folder: Path) -> AsyncIterator[int]:
    with redis_server(FAST) as redis_url:
        config = WeightsConfig(folder=folder, redis_url=redis_url, port=0, drain_seconds=0.5)
        async with build_weights(config) as service, started(service, config, "weights") as port:
            yield port


@asynccontextmanager
async def _fake_server(weights_port: int, address: str) -> AsyncIterator[None]:
    config = RolloutServerConfig(
        engine="fake",
        run_id=RUN,
        port=int(address.rpartition(":")[2]),
        weights=f"127.0.0.1:{weights_port}",
        weight_relay_address=address,
        weight_transports=("relay", "shard_stream"),
        drain_seconds=0.0,
    )
    async with build_server(config) as service, started(service, config, "rollout_server"):
        yield


def _loaded(times: int) -> bool:
    return REGISTRY.get_sample_value("seamflow_rollout_server_weight_updates_total") == times


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


def _described_all(folder: Path) -> list[pb.WeightFile]:
    return [_described(path) for path in sorted(folder.iterdir())]


def _described(path: Path) -> pb.WeightFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return pb.WeightFile(name=path.name, num_bytes=path.stat().st_size, sha256=digest)


def _model(folder: Path, seed: int) -> Path:
    """A random Qwen3 of 20 million weights."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(64)}, "t0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)  # type: ignore[no-untyped-call]
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
