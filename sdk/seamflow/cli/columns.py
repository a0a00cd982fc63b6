"""Command about the columns of a run's samples: which are written, and which are being computed."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator

import grpc.aio

from seamflow.cli.arguments.verbs import Verbs
from seamflow.cli.endpoints import Endpoints
from seamflow.cli.named_run import manager_of_run
from seamflow.pages import pages
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import column_service_pb2 as pb
from seamflow.trajectory.v1.column_service_pb2_grpc import ColumnServiceStub

_SECONDS = 10.0


def register(verbs: Verbs) -> None:
    """Add `seamflow columns`."""
    verbs.add("columns", "Which columns the samples that wait for training have.", _columns)


async def _columns(_given: argparse.Namespace, endpoints: Endpoints) -> int:
    async with manager_of_run(endpoints) as (channel, run_id):
        async for text in columns(channel, run_id):
            print(text)
    return 0


async def columns(channel: grpc.aio.Channel, run_id: str) -> AsyncIterator[str]:
    """A line for each sample of complete groups that is not committed.

    Raises:
        grpc.aio.AioRpcError: the trajectory manager rejects the request, or does not answer.
    """
    stub = async_stub(ColumnServiceStub, channel)
    request = pb.ListSampleStatusRequest(run_id=run_id)
    async for page in pages(lambda page: stub.ListSampleStatus(page, timeout=_SECONDS), request):
        for sample in page.samples:
            yield _render(sample)


def _render(sample: pb.SampleStatus) -> str:
    written = ", ".join(sample.ready_columns) or "none"
    leased = f"; computed now: {', '.join(sample.leased_columns)}" if sample.leased_columns else ""
    step = f"; leased for step {sample.leased_step}" if sample.leased_step else ""
    return f"{sample.sample_id}  columns written: {written}{leased}{step}"
