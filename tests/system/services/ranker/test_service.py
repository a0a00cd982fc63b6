"""The ranker as a gateway meets it: its own process's wiring, a real manager, a real Redis."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np
import pytest
from seamflow.ranker.v1 import ranker_service_pb2 as pb
from seamflow.ranker.v1.ranker_service_pb2_grpc import RankerServiceStub
from seamflow.stubs import async_stub

from rollout.gateway.config import GatewayConfig
from rollout.gateway.dispatch.length_estimators import LengthQuery, load_lengths
from services.chassis.rpc.server import started
from services.ranker.cli import build
from services.ranker.config import RankerConfig
from services.ranker.learner import recall_of_longest
from tests.lib.ranker.support import group, length, manager, prompts, record, turn

if TYPE_CHECKING:
    from seamflow.ranker.v1.ranker_service_pb2_grpc import RankerServiceAsyncStub


@asynccontextmanager
async def ranker(run_id: str, address: str) -> AsyncIterator[tuple[str, Any]]:
    """Address and stub of a ranker that learns from 200 turns on."""
    config = RankerConfig(
        run_id=run_id,
        trajectory_manager=address,
        train_every_turns=200,
        admin_port=-1,
        drain_seconds=0.2,
    )
    async with (
        build(config) as service,
        started(service, config) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield f"127.0.0.1:{port}", async_stub(RankerServiceStub, channel)


async def learned(stub: RankerServiceAsyncStub, run_id: str) -> pb.GetRankerResponse:
    """What it knows, once it knows something."""
    async with asyncio.timeout(30):
        while True:
            response: pb.GetRankerResponse = await stub.GetRanker(
                pb.GetRankerRequest(run_id=run_id)
            )
            if response.num_turns:
                return response
            await asyncio.sleep(0.01)


async def test_a_gateway_gets_lengths_that_were_learned_from_the_store(redis_url: str) -> None:
    """From recorded turns in Redis to the gateway's estimator; nothing is kept in between."""
    seen, new = prompts(240), prompts(40, seed=1)
    groups = [group(f"t{i}@0", [turn("a", p, length(p))]) for i, p in enumerate(seen)]
    async with manager("ranked", redis_url=redis_url) as (address, store):
        await record(store, "ranked", groups)
        async with ranker("ranked", address) as (target, stub):
            facts = await learned(stub, "ranked")
            assert facts.num_turns >= 200
            assert facts.recall > 0.5
            assert facts.median_tokens < facts.p90_tokens
            config = GatewayConfig(
                run_id="ranked", model=Path("model"), lengths="ranker", ranker=target
            )
            lengths = load_lengths(config)
            turns = [LengthQuery(group=f"n{i}@0", token_ids=p) for i, p in enumerate(new)]
            async with asyncio.timeout(30):
                while None in (expected := [lengths.predict(t) for t in turns]):
                    for t in turns:
                        lengths.prefetch(t)
                    await asyncio.sleep(0.01)
            await lengths.close()
    actual = np.array([float(length(p)) for p in new])
    assert recall_of_longest(np.array(expected), actual) >= 0.6


async def test_a_run_it_knows_nothing_of_is_not_found() -> None:
    """Another run's, and its own before it has learned; the latter has facts, all 0."""
    async with manager("run") as (address, _), ranker("run", address) as (_, stub):
        for run_id in ("run", "other"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.PredictLengths(pb.PredictLengthsRequest(run_id=run_id))
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert await stub.GetRanker(pb.GetRankerRequest(run_id="run")) == pb.GetRankerResponse()


async def test_a_request_that_is_too_large_is_refused() -> None:
    """With the bound."""
    many = pb.PredictLengthsRequest(run_id="run", prompts=[pb.Prompt()] * 1025)
    async with manager("run") as (address, _), ranker("run", address) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="at most 1024") as caught:
            await stub.PredictLengths(many)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_process_starts_before_its_run_and_ends_with_a_signal(tmp_path: Path) -> None:
    """`python -m services.ranker` waits for the run; SIGTERM ends it clean."""
    port_file = tmp_path / "port"
    async with manager("other") as (address, _):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "services.ranker", "--run-id", "run", "--trajectory-manager", address),
            *("--admin-port", "-1", "--drain-seconds", "0.2"),
            env={
                **os.environ,
                "PYTHONPATH": ":".join(sys.path),
                "SEAMFLOW_PORT_FILE": str(port_file),
            },
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(30):
            while not port_file.exists():
                await asyncio.sleep(0.02)
            process.terminate()
            _, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()


@pytest.mark.parametrize(("setting", "value"), [("window_prompts", 3), ("train_every_turns", 0)])
def test_settings_that_learn_nothing_are_refused(setting: str, value: float) -> None:
    """By name and value."""
    settings: dict[str, Any] = {"run_id": "run", setting: value}
    with pytest.raises(ValueError, match=rf"(?s){setting}.* should be greater than"):
        RankerConfig(**settings)
