"""A run of seamflow under the workload: a real trajectory manager on the given Redis."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import numpy as np
from google.protobuf.duration_pb2 import Duration
from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2, sample_service_pb2, trajectory_pb2
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceStub

from bench.baselines.store.workload import Options, Reads, Segment

if TYPE_CHECKING:
    from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceAsyncStub

RUN_ID = "bench"
CREDENTIAL = hashlib.sha256(b"bench").hexdigest()
_START_SECONDS = 30.0
_READ_SECONDS = 30
_PAGE_BYTES = 1 << 20


@asynccontextmanager
async def manager(options: Options, durability: str = "fast") -> AsyncIterator[str]:
    """The address of a trajectory manager of its own process."""
    with tempfile.TemporaryDirectory(prefix="seamflow-bench-") as folder:
        port_file = Path(folder, "port")
        flags = {
            "port": "0",
            "admin-port": "-1",
            "redis-url": options.redis,
            "durability": durability,
            "max-queued-tasks": str(options.trajectories),
            "log-level": "warning",
        }
        command = ["-m", "trajectory_manager"]
        command += [part for name, value in flags.items() for part in (f"--{name}", value)]
        environment = {**os.environ, "SEAMFLOW_PORT_FILE": str(port_file)}
        process = await asyncio.create_subprocess_exec(sys.executable, *command, env=environment)
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await asyncio.to_thread(port_file.exists):
                    await asyncio.sleep(0.02)
            written = await asyncio.to_thread(port_file.read_text)
            yield f"127.0.0.1:{json.loads(written)['port']}"
        finally:
            process.terminate()
            await process.wait()


async def create_run(channel: grpc.aio.Channel, options: Options, durability: int) -> None:
    """A run whose steps are batches of single trajectories, with room for all of them."""
    steps = -(-options.trajectories // options.batch)
    config = trajectory_pb2.RunConfig(
        group_size=1,
        groups_per_step=options.batch,
        max_staleness=steps,
        staleness_policy=trajectory_pb2.STALENESS_POLICY_MASK,
        lease_duration=Duration(seconds=600),
        durability=durability,  # type: ignore[arg-type]
    )
    request = run_service_pb2.CreateRunRequest(run_id=RUN_ID, config=config)
    runs = async_stub(RunServiceStub, channel)
    # A replica that has just connected does not count for some moments.
    await retrying(lambda: runs.CreateRun(request))


def packed(segments: Sequence[Segment]) -> tokens_pb2.PackedTokens:
    """Segments as they travel: versions as spans, not per token."""
    message = tokens_pb2.PackedTokens()
    pack(message, segments)
    return message


def pack(message: tokens_pb2.PackedTokens, segments: Sequence[Segment]) -> None:
    """Write segments into `message`, as they travel."""
    message.token_ids = b"".join([segment.token_ids.tobytes() for segment in segments])
    message.logprobs = b"".join([segment.logprobs.tobytes() for segment in segments])
    start = 0
    for version, run in groupby(segments, key=attrgetter("weight_version")):
        num_tokens = sum([segment.token_ids.size for segment in run])
        message.spans.add(
            start=start,
            num_tokens=num_tokens,
            origin=tokens_pb2.ORIGIN_POLICY,
            weight_version=version,
            version_source=tokens_pb2.VERSION_SOURCE_ENGINE,
            server_id="server-0",
        )
        start += num_tokens


def read(report: Connection, options: Options, target: str) -> None:
    """Lease batch after batch as the trainer does, and commit each."""
    asyncio.run(_read(report, options, target))


async def _read(report: Connection, options: Options, target: str) -> None:
    async with connect(target) as channel:
        stub = async_stub(SampleServiceStub, channel)
        reconcile = sample_service_pb2.ReconcileRequest(run_id=RUN_ID, trainer_id="bench")
        epoch = (await stub.Reconcile(reconcile)).epoch
        report.send("ready")
        trajectories = num_bytes = step = 0
        while trajectories < options.trajectories:
            request = sample_service_pb2.LeaseSamplesRequest(
                run_id=RUN_ID,
                epoch=epoch,
                step=step + 1,
                num_groups=min(options.batch, options.trajectories - trajectories),
                wait=Duration(seconds=_READ_SECONDS),
                max_bytes=_PAGE_BYTES,
            )
            step += 1
            async for sample in _samples(stub, request):
                num_bytes += _columns(sample).nbytes
                trajectories += 1
            commit = sample_service_pb2.CommitStepRequest(run_id=RUN_ID, epoch=epoch, step=step)
            await stub.CommitStep(commit)
    report.send(Reads(ended=time.monotonic(), trajectories=trajectories, bytes=num_bytes))


async def _samples(
    stub: SampleServiceAsyncStub, request: sample_service_pb2.LeaseSamplesRequest
) -> AsyncIterator[trajectory_pb2.Sample]:
    """A step, page by page, as the trainer leases it."""
    while True:
        page = await stub.LeaseSamples(request)
        if not page.samples:
            raise TimeoutError(f"step {request.step} was not ready within {_READ_SECONDS} s")
        for sample in page.samples:
            yield sample
        if not page.next_sample:
            return
        request.first_sample = page.next_sample


def _columns(sample: trajectory_pb2.Sample) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """[3, num_tokens]: ids, log-probabilities by their bits, versions."""
    tokens = sample.tokens
    lengths = [span.num_tokens for span in tokens.spans]
    versions = np.array([span.weight_version for span in tokens.spans], np.int32)
    return np.stack(
        [
            np.frombuffer(tokens.token_ids, np.int32),
            np.frombuffer(tokens.logprobs, np.int32),
            np.repeat(versions, lengths),
        ]
    )
