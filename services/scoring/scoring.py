"""The loop of the scoring service: lease samples without the column, score them, write the column.

Stateless: after a crash, leases expire and other scoring services get the samples. This is
RLHFuse's inter-stage fusion per sample (arXiv 2409.13221, section 4): a sample is scored as soon as
its rollout has finished, while others of its group are still generated.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import to_duration
from seamflow.errors import (
    ConflictError,
    ExhaustedError,
    NotFoundError,
    PreconditionError,
    SeamflowError,
)
from seamflow.retry import Backoff
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import column_service_pb2 as pb
from seamflow.trajectory.v1 import column_service_pb2_grpc as pb_grpc
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis import metrics
from services.chassis.log import get_logger
from services.chassis.rpc.clients import retry_forever
from services.scoring.config import ScoringConfig
from services.scoring.node_request import ScoredRollouts
from services.scoring.scorer import Row, Scorer, prefix_batches

_POLL_SECONDS = 20.0
_ABSENT_SECONDS = 1.0
_MAX_MESSAGE = 4000
_INFRASTRUCTURE = tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
_log = get_logger()
_SAMPLES = metrics.counter("scoring", "samples_total", "Scored samples.")
_TOKENS = metrics.counter("scoring", "tokens_total", "Tokens of scored samples.")
_SECONDS = metrics.histogram("scoring", "batch_seconds", "Time to score the samples of a lease.")
_LOST = metrics.counter("scoring", "leases_lost_total", "Leases that expired before the write.")
_FAILED = metrics.counter("scoring", "failures_total", "Samples that the scorer failed on.")


@dataclass(slots=True)
class _Scored:
    """What became of leased samples."""

    values: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """By sample."""
    left: list[str] = field(default_factory=list)
    """Samples that were not begun."""
    failures: list[pb.ColumnFailure] = field(default_factory=list)
    """Samples that the scorer failed on."""


class Scoring:
    """Scores the samples of one run for one column."""

    def __init__(
        self,
        config: ScoringConfig,
        channel: grpc.aio.Channel,
        scorer: Scorer,
        scored: ScoredRollouts | None = None,
    ) -> None:
        # The generated constructor is typed for blocking channels.
        self._stub = async_stub(pb_grpc.ColumnServiceStub, channel)
        self._config = config
        self._scorer = scorer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._num_samples = config.max_samples
        self._rollouts = ScoredRollouts() if scored is None else scored
        self._away = Backoff()

    async def run(self, stop: asyncio.Event) -> None:
        """Lease, score and write; returns after the write that follows `stop`.

        What was not begun by then is given back.
        """
        try:
            while not stop.is_set():
                leased = await self._lease_unless(stop)
                if leased.samples:
                    scored = await self._score(leased.samples, stop)
                    self._adjust(in_time=await self._write(leased, scored))
                    await self._wait_after(scored)
        finally:
            self._thread.shutdown(wait=False)
            del self._scorer  # frees its memory even while calls that were cancelled end

    async def _lease_unless(self, stop: asyncio.Event) -> pb.LeaseColumnResponse:
        """Lease samples; once `stop` is set those that the ended call was granted, to give back."""
        request = self._request()
        lease = asyncio.create_task(self._lease(request))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({lease, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if lease.done():
                return lease.result()
        finally:
            lease.cancel()
            stopped.cancel()
            await asyncio.gather(lease, stopped, return_exceptions=True)
        request.ClearField("wait")
        return await self._lease(request)

    async def _lease(self, request: pb.LeaseColumnRequest) -> pb.LeaseColumnResponse:
        try:
            return await retry_forever("LeaseColumn", lambda: self._stub.LeaseColumn(request))
        except NotFoundError:
            _log.warning("run_not_found", run_id=self._config.run_id)
            await asyncio.sleep(_ABSENT_SECONDS)
            return pb.LeaseColumnResponse()
        except ExhaustedError as error:
            _log.warning("lease_too_large", num_samples=self._num_samples, error=str(error))
            self._adjust(in_time=False)
            await asyncio.sleep(_ABSENT_SECONDS)
            return pb.LeaseColumnResponse()

    def _request(self) -> pb.LeaseColumnRequest:
        return pb.LeaseColumnRequest(
            run_id=self._config.run_id,
            column=self._config.column,
            needs=self._config.needs,
            max_samples=self._num_samples,
            wait=to_duration(_POLL_SECONDS),
            request_id=uuid.uuid4().hex,
        )

    async def _score(
        self, samples: Sequence[trajectory_pb2.Sample], stop: asyncio.Event
    ) -> _Scored:
        """Score `micro_batch_tokens` at a time: `stop` is noticed between two forward passes."""
        rows = [_row(sample) for sample in samples]
        scored, began = _Scored(), time.monotonic()
        for numbers in prefix_batches(rows, self._config.micro_batch_tokens):
            batch = [rows[number] for number in numbers]
            if stop.is_set():
                scored.left += [row.sample_id for row in batch]
            else:
                await self._score_batch(batch, scored)
        if values := scored.values:
            seconds = time.monotonic() - began
            _SECONDS.observe(seconds)
            self._rollouts.add([each for each in samples if each.sample_id in values], seconds)
            _SAMPLES.inc(len(values))
            _TOKENS.inc(sum(len(row.token_ids_T) for row in rows if row.sample_id in values))
        return scored

    async def _score_batch(self, rows: Sequence[Row], scored: _Scored) -> None:
        try:
            scored.values |= await self._score_rows(rows)
        except Exception:  # possibly caused by one sample: score the others
            for row in rows:
                await self._score_alone(row, scored)

    async def _score_alone(self, row: Row, scored: _Scored) -> None:
        try:
            scored.values |= await self._score_rows([row])
        except Exception as error:
            _FAILED.inc()
            _log.error("scoring_failed", sample_id=row.sample_id, error=str(error))
            scored.failures.append(
                pb.ColumnFailure(
                    sample_id=row.sample_id,
                    failure_class=_failure_class(error),
                    message=f"{type(error).__name__}: {error}"[:_MAX_MESSAGE],
                )
            )

    async def _wait_after(self, scored: _Scored) -> None:
        """Wait longer and longer while what the scorer needs is away."""
        if any(each.failure_class == _INFRASTRUCTURE for each in scored.failures):
            await self._away.wait()
        else:
            self._away.reset()

    async def _score_rows(self, rows: Sequence[Row]) -> dict[str, NDArray[np.float32]]:
        loop = asyncio.get_running_loop()
        values = await loop.run_in_executor(self._thread, self._scorer.score, rows)
        _check(rows, values)
        return {row.sample_id: found for row, found in zip(rows, values, strict=True)}

    async def _write(
        self,
        leased: pb.LeaseColumnResponse,
        scored: _Scored,
    ) -> bool:
        """Write the column, give back what is left; whether the lease was still valid."""
        request = pb.WriteColumnRequest(
            run_id=self._config.run_id,
            column=self._config.column,
            lease_token=leased.lease_token,
            values=[
                pb.ColumnValues(sample_id=sample_id, values=found.astype("<f4").tobytes())
                for sample_id, found in scored.values.items()
            ],
            returned_sample_ids=scored.left,
            failures=scored.failures,
        )
        try:
            written = await retry_forever("WriteColumn", lambda: self._stub.WriteColumn(request))
        except (PreconditionError, NotFoundError, ConflictError, ExhaustedError) as error:
            # The lease expired, the rollout was deleted, another service wrote the column, or the
            # message is too large.
            _LOST.inc()
            _log.warning("lease_lost", num_samples=len(scored.values), error=str(error))
            return False
        if written.num_replaced:
            _log.error("samples_replaced", number=written.num_replaced, column=self._config.column)
        return True

    def _adjust(self, in_time: bool) -> None:
        """Halve the samples per lease after a lost lease, else raise them by one."""
        fewer, more = max(self._num_samples // 2, 1), self._num_samples + 1
        self._num_samples = min(more, self._config.max_samples) if in_time else fewer


def _failure_class(error: Exception) -> tokens_pb2.FailureClass.ValueType:
    """INFRASTRUCTURE if what the scorer needs is away; else the sample cannot be scored."""
    is_away = isinstance(error, OSError | TimeoutError | SeamflowError | grpc.RpcError)
    return _INFRASTRUCTURE if is_away else tokens_pb2.FAILURE_CLASS_ENVIRONMENT


def _row(sample: trajectory_pb2.Sample) -> Row:
    return Row(
        sample_id=sample.sample_id,
        token_ids_T=np.frombuffer(sample.tokens.token_ids, "<i4"),
        temperatures_T=_temperatures(sample),
        columns={entry.name: np.frombuffer(entry.values, "<f4") for entry in sample.columns},
    )


def _temperatures(sample: trajectory_pb2.Sample) -> NDArray[np.float32]:
    given = [turn.sampling for turn in sample.turns]
    values = [one.temperature if one.HasField("temperature") else 1.0 for one in given]
    return np.repeat(np.array(values, np.float32), [turn.num_tokens for turn in sample.turns])


def _check(rows: Sequence[Row], values: Sequence[NDArray[np.float32]]) -> None:
    """Check the scorer's values before they are written.

    Raises:
        ValueError: values are missing, not finite, or of the wrong shape.
    """
    if len(values) != len(rows):
        raise ValueError(f"the scorer gave {len(values)} values for {len(rows)} samples")
    for row, found in zip(rows, values, strict=True):
        if found.shape not in ((1,), (len(row.token_ids_T),)):
            raise ValueError(
                f"sample {row.sample_id!r}: the scorer gave values of shape {found.shape}; return "
                f"one value, or one for each of {len(row.token_ids_T)} tokens"
            )
        if not np.isfinite(found).all():
            raise ValueError(
                f"sample {row.sample_id!r}: the scorer gave values that are not finite"
            )
