"""Rollout servers that load what is published: two embedded engines, and SGLang if it is there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from seamflow.channel import connect
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from bench.baselines.generation.sglang_server import PYTHON as SGLANG
from bench.harness.processes import Server, service

_SGLANG_FLAGS = (
    *("--device", "cpu", "--dtype", "bfloat16", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--sleep-on-idle"),
    *("--max-total-tokens", "2048", "--mem-fraction-static", "0.1"),
)
_LOOK_SECONDS = 0.05
_LOAD_SECONDS = 600.0


def receivers(folder: Path, model: Path, weights: str, run_id: str) -> dict[str, Server]:
    """By name, not started: torch-0, torch-1 and sglang.

    Raises:
        RuntimeError: `make .venv-sglang` was not called.
    """
    if not SGLANG.exists():
        raise RuntimeError(f"{SGLANG} is missing: `make .venv-sglang` makes it")
    common: dict[str, object] = {
        "model": model,
        "weights": weights,
        "run_id": run_id,
        "max_running": 4,
        "max_context": 256,
        "torch_dtype": "bfloat16",
        # From the service, over gRPC: no folder in common with it.
        "weight_transports": json.dumps(["relay", "shard_stream"]),
        "weight_fetch_seconds": _LOAD_SECONDS,
    }
    made = {}
    for name in ("torch-0", "torch-1", "sglang"):
        engine: dict[str, object] = {"engine": "torch"}
        if name == "sglang":
            command = [str(SGLANG), "-m", "sglang.launch_server"]
            engine = {
                "engine": "sglang",
                "sglang_command": json.dumps(command),
                "sglang_flags": json.dumps(list(_SGLANG_FLAGS)),
            }
        own = folder / name
        own.mkdir(parents=True)
        settings = common | engine | {"cache_folder": own / "cache", "server_id": name}
        made[name] = service("rollout.server", "rollout_server", own, **settings)
    return made


async def seconds_until_loaded(addresses: Sequence[str], weight_version: int) -> float:
    """Until every server serves this version or a newer one.

    Raises:
        TimeoutError: one does not within ten minutes.
    """
    began = time.monotonic()
    async with asyncio.timeout(_LOAD_SECONDS):
        await asyncio.gather(*(_until_loaded(each, weight_version) for each in addresses))
    return time.monotonic() - began


async def _until_loaded(address: str, weight_version: int) -> None:
    async with connect(address) as channel:
        stub = async_stub(RolloutServerServiceStub, channel)
        while True:
            info = await stub.GetServerInfo(server_pb.GetServerInfoRequest())
            if info.weight_version >= weight_version:
                return
            await asyncio.sleep(_LOOK_SECONDS)


async def download(channel: grpc.aio.Channel, run_id: str, weight_version: int) -> None:
    """Fetch all files of a version and keep nothing: the bytes' way to one receiver alone."""
    stub: Any = WeightServiceStub(channel)
    request = pb.FetchShardsRequest(run_id=run_id, weight_version=weight_version)
    async for _ in stub.FetchShards(request):
        pass
