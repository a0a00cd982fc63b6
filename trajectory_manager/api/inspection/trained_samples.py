"""RecordTrainedSamples and ListTrainedSamples: what a step trained on."""

from __future__ import annotations

from collections.abc import Sequence

from seamflow.trajectory.v1 import sample_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import invalid_argument
from services.chassis.rpc import fields
from trajectory_manager.api import validation
from trajectory_manager.store.redis.inspection_store import InspectionStore, TrainedRecord

_MAX_SAMPLES, _MAX_NAMES = 1024, 1000
_PAGE_BYTES = 4 << 20
_VALUE_BYTES = 2
_VALUES = ("spans", "logprob_differences", "advantages")
"""Fields with values of tokens."""


async def record_trained(
    store: InspectionStore, request: pb.RecordTrainedSamplesRequest
) -> pb.RecordTrainedSamplesResponse:
    """Record samples of a step.

    Raises:
        ServiceError: INVALID_ARGUMENT; STALE_EPOCH; NOT_FOUND (run).
    """
    validation.bounded("samples", len(request.samples), _MAX_SAMPLES)
    await store.record_trained(
        validation.run_name(request.run_id),
        request.epoch,
        fields.positive("step", request.step),
        [_record(f"samples[{i}]", sample) for i, sample in enumerate(request.samples)],
        fields.positive("num_kept_steps", request.num_kept_steps),
    )
    return pb.RecordTrainedSamplesResponse()


def _record(field: str, sample: trajectory_pb2.TrainedSample) -> TrainedRecord:
    rollout_id, _, turn_id = sample.sample_id.partition("#")
    validation.name(f"{field}.sample_id", rollout_id)
    validation.name(f"{field}.sample_id", turn_id)
    validation.bounded(f"{field}.num_trained_tokens", sample.num_trained_tokens, sample.num_tokens)
    _check_values(field, sample)
    summary, tokens = trajectory_pb2.TrainedSample(), trajectory_pb2.TrainedSample()
    summary.CopyFrom(sample)
    for name in _VALUES:
        summary.ClearField(name)  # type: ignore[arg-type]
    tokens.spans.extend(sample.spans)
    tokens.logprob_differences = sample.logprob_differences
    tokens.advantages = sample.advantages
    return TrainedRecord(
        sample_id=sample.sample_id,
        summary=summary.SerializeToString(),
        tokens=tokens.SerializeToString(),
    )


def _check_values(field: str, sample: trajectory_pb2.TrainedSample) -> None:
    number = sample.num_trained_tokens
    whole, one = number * _VALUE_BYTES, _VALUE_BYTES
    if (covered := sum(span.num_tokens for span in sample.spans)) not in (0, number):
        cure = f"none, or all {number} trained tokens"
        raise invalid_argument(f"{field}.spans", f"{covered} tokens", cure)
    if (size := len(sample.logprob_differences)) not in (0, whole):
        cure = f"a float16 for each of {number} trained tokens, or none"
        raise invalid_argument(f"{field}.logprob_differences", f"{size} bytes", cure)
    if (size := len(sample.advantages)) not in (0, one, whole):
        cure = f"one float16, one for each of {number} trained tokens, or none"
        raise invalid_argument(f"{field}.advantages", f"{size} bytes", cure)


async def list_trained(
    store: InspectionStore, request: pb.ListTrainedSamplesRequest
) -> pb.ListTrainedSamplesResponse:
    """A page of what is recorded of a step.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    run_id = validation.run_name(request.run_id)
    start, limit = validation.page(request.page_size, request.page_token)
    validation.bounded("rollout_ids", len(request.rollout_ids), _MAX_NAMES)
    steps = await store.trained_steps(run_id)
    step = fields.not_negative("step", request.step) or max(steps, default=0)
    names = await store.trained_samples(run_id, step)
    if request.rollout_ids:
        asked = set(request.rollout_ids)
        names = [name for name in names if name.partition("#")[0] in asked]
    page = names[start : start + limit]
    samples = await _read(store, run_id, step, page, with_tokens=request.with_tokens)
    end = start + len(samples)
    return pb.ListTrainedSamplesResponse(
        samples=samples,
        next_page_token=str(end) if end < len(names) and samples else "",
        step=step,
        recorded_steps=steps,
    )


async def _read(
    store: InspectionStore, run_id: str, step: int, names: Sequence[str], *, with_tokens: bool
) -> list[trajectory_pb2.TrainedSample]:
    """As many of the samples as a response holds, at least one."""
    found, num_bytes, batch = list[trajectory_pb2.TrainedSample](), 0, 32 if with_tokens else 1000
    for start in range(0, len(names), batch):
        records = await store.trained(
            run_id, step, names[start : start + batch], with_tokens=with_tokens
        )
        for record in records:
            sample = trajectory_pb2.TrainedSample.FromString(record.summary)
            sample.MergeFromString(record.tokens)
            found.append(sample)
            num_bytes += len(record.summary) + len(record.tokens)
            if num_bytes > _PAGE_BYTES:
                return found
    return found
