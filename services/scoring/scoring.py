"""Leases samples that lack the column, scores them, writes the column; again and again.

Nothing is kept here: what a service had leased when it died is leased to another one. That is
RLHFuse's fusion at the level of samples (arXiv 2409.13221, section 4): a sample is scored as soon
as its group is complete, while other groups are still generated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import grpc.aio
import numpy as np
from google.protobuf.duration_pb2 import Duration
from numpy.typing import NDArray
from seamflow.errors import NotFoundError, PreconditionError
from seamflow.retry import retrying
from seamflow.trajectory.v1 import column_service_pb2 as pb
from seamflow.trajectory.v1 import column_service_pb2_grpc as pb_grpc
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis import metrics
from services.chassis.log import get_logger
from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row, Scorer

__all__ = ["Scoring"]

_POLL_SECONDS = 20.0
_ABSENT_SECONDS = 1.0
_log = get_logger()
_SAMPLES = metrics.counter("scoring", "samples_total", "Samples that were scored.")
_TOKENS = metrics.counter("scoring", "tokens_total", "Tokens of these.")
_SECONDS = metrics.histogram("scoring", "batch_seconds", "Time to score what was leased at once.")
_LOST = metrics.counter("scoring", "leases_lost_total", "Scored too late: leased to another one.")


class Scoring:
    """One column of one run."""

    def __init__(self, config: ScoringConfig, channel: grpc.aio.Channel, scorer: Scorer) -> None:
        # The generated constructor is typed for blocking channels.
        self._stub: pb_grpc.ColumnServiceAsyncStub = pb_grpc.ColumnServiceStub(channel)  # type: ignore[assignment]
        self._config = config
        self._scorer = scorer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            leased = await self._lease()
            if leased.samples:
                await self._write(leased, await self._scored(leased.samples))

    async def _lease(self) -> pb.LeaseColumnResponse:
        request = pb.LeaseColumnRequest(
            run_id=self._config.run_id,
            column=self._config.column,
            needs=self._config.needs,
            max_samples=self._config.max_samples,
            wait=_duration(_POLL_SECONDS),
        )
        try:
            return await retrying(lambda: self._stub.LeaseColumn(request))
        except NotFoundError:
            _log.warning("run_does_not_exist_yet", run_id=self._config.run_id)
            await asyncio.sleep(_ABSENT_SECONDS)
            return pb.LeaseColumnResponse()

    async def _scored(
        self, samples: Sequence[trajectory_pb2.Sample]
    ) -> Sequence[NDArray[np.float32]]:
        rows = [_row(sample) for sample in samples]
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        values = await loop.run_in_executor(self._thread, self._scorer.score, rows)
        _SECONDS.observe(time.monotonic() - began)
        _SAMPLES.inc(len(rows))
        _TOKENS.inc(sum(len(row.token_ids_T) for row in rows))
        _check(rows, values)
        return values

    async def _write(
        self, leased: pb.LeaseColumnResponse, values: Sequence[NDArray[np.float32]]
    ) -> None:
        request = pb.WriteColumnRequest(
            run_id=self._config.run_id,
            column=self._config.column,
            lease_token=leased.lease_token,
            values=[
                pb.ColumnValues(sample_id=sample.sample_id, values=found.astype("<f4").tobytes())
                for sample, found in zip(leased.samples, values, strict=True)
            ],
        )
        try:
            await retrying(lambda: self._stub.WriteColumn(request))
        except PreconditionError as error:
            # Another service has these samples now; what it computes is the same.
            _LOST.inc()
            _log.warning("lease_lost", num_samples=len(values), error=str(error))


def _row(sample: trajectory_pb2.Sample) -> Row:
    return Row(
        sample_id=sample.sample_id,
        token_ids_T=np.frombuffer(sample.packed_tokens.token_ids, "<i4"),
        temperature=sample.temperature,
        columns={entry.name: np.frombuffer(entry.values, "<f4") for entry in sample.columns},
    )


def _check(rows: Sequence[Row], values: Sequence[NDArray[np.float32]]) -> None:
    """A plug-in's mistake is told here, by name, and not by whoever reads the column.

    Raises:
        ValueError: a value is missing or no number.
    """
    if len(values) != len(rows):
        raise ValueError(f"the scorer gave {len(values)} values for {len(rows)} samples")
    for row, found in zip(rows, values, strict=True):
        if found.shape not in ((1,), (len(row.token_ids_T),)):
            raise ValueError(
                f"sample {row.sample_id!r}: the scorer gave values of shape {found.shape}; one is "
                f"wanted, or one for each of {len(row.token_ids_T)} tokens"
            )
        if not np.isfinite(found).all():
            raise ValueError(f"sample {row.sample_id!r}: the scorer gave values that are no number")


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration
