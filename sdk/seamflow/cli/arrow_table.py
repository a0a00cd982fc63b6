"""Samples as a table of Apache Arrow, one row each: what `seamflow export` writes.

Token arrays are lists of equal length: token_ids, logprobs, loss_mask, weight_versions. Spans give
who made which tokens, turns which parts were added by which turn, from the root on, with its
sampling parameters as JSON. `rewards` and `columns` are maps by name.
A committed_step of 0 means that no step committed the sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from google.protobuf.json_format import MessageToJson

from seamflow.common.v1 import tokens_pb2
from seamflow.enum_names import enum_name
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import trajectory_pb2

ENVIRONMENT_VERSION = -1
"""In weight_versions, for tokens that no policy sampled."""


def table_of(arrow: Any, rows: Sequence[sample_pb.ListedSample]) -> Any:
    """One row per sample, with `arrow` the pyarrow module."""
    samples = [row.sample for row in rows]
    text, number, count = arrow.string(), arrow.float32(), arrow.int64()
    numbers = arrow.map_(text, arrow.list_(number))
    packed = [sample.tokens for sample in samples]
    masks = _lists(arrow, arrow.uint8(), [sample.loss_mask for sample in samples])
    return arrow.table(
        {
            "sample_id": arrow.array([sample.sample_id for sample in samples], text),
            "rollout_id": arrow.array([sample.rollout_id for sample in samples], text),
            "group_id": arrow.array([sample.group_id for sample in samples], text),
            "purpose": arrow.array(
                [enum_name(tokens_pb2.Purpose, row.purpose) for row in rows], text
            ),
            "state": arrow.array(
                [enum_name(trajectory_pb2.RolloutState, row.state) for row in rows], text
            ),
            "rewards": arrow.array(
                [[(r.name, r.value) for r in sample.rewards] for sample in samples],
                arrow.map_(text, arrow.float64()),
            ),
            "token_ids": _lists(arrow, arrow.int32(), [tokens.token_ids for tokens in packed]),
            "logprobs": _lists(arrow, number, [tokens.logprobs for tokens in packed]),
            "loss_mask": masks.cast(arrow.list_(arrow.bool_())),
            "weight_versions": _lists(arrow, count, [_versions(tokens) for tokens in packed]),
            "spans": arrow.array([list(_spans(tokens)) for tokens in packed], _span_type(arrow)),
            "turns": arrow.array([list(_turns(s)) for s in samples], _turn_type(arrow)),
            "truncated": arrow.array([s.truncated for s in samples], arrow.bool_()),
            "min_weight_version": arrow.array([s.min_weight_version for s in samples], count),
            "max_weight_version": arrow.array([s.max_weight_version for s in samples], count),
            "committed_step": arrow.array([row.committed_step for row in rows], count),
            "columns": arrow.array([_columns(sample) for sample in samples], numbers),
        }
    )


def _lists(arrow: Any, kind: Any, chunks: Sequence[bytes]) -> Any:
    """A column of lists from the bytes of each, without making a Python object of each number."""
    width = kind.bit_width // 8
    ends = accumulate((len(chunk) // width for chunk in chunks), initial=0)
    offsets = arrow.array(list(ends), arrow.int32())
    buffer = arrow.py_buffer(b"".join(chunks))
    values = arrow.Array.from_buffers(kind, buffer.size // width, [None, buffer])
    return arrow.ListArray.from_arrays(offsets, values)


def _versions(tokens: tokens_pb2.PackedTokens) -> bytes:
    versions = array("q")
    for span in tokens.spans:
        sampled = span.origin == tokens_pb2.ORIGIN_POLICY
        version = span.weight_version if sampled else ENVIRONMENT_VERSION
        versions.extend([version] * span.num_tokens)
    return versions.tobytes()


def _spans(tokens: tokens_pb2.PackedTokens) -> Iterator[dict[str, object]]:
    for span in tokens.spans:
        yield {
            "start": span.start,
            "num_tokens": span.num_tokens,
            "origin": enum_name(tokens_pb2.Origin, span.origin),
            "weight_version": span.weight_version,
            "version_source": enum_name(tokens_pb2.VersionSource, span.version_source),
            "server_id": span.server_id,
        }


def _span_type(arrow: Any) -> Any:
    fields = {
        "start": arrow.int32(),
        "num_tokens": arrow.int32(),
        "origin": arrow.string(),
        "weight_version": arrow.int64(),
        "version_source": arrow.string(),
        "server_id": arrow.string(),
    }
    return arrow.list_(arrow.struct(fields))


def _turns(sample: trajectory_pb2.Sample) -> Iterator[dict[str, object]]:
    for turn in sample.turns:
        yield {
            "turn_id": turn.turn_id,
            "num_tokens": turn.num_tokens,
            "sampling": MessageToJson(turn.sampling, preserving_proto_field_name=True, indent=None),
            "rewards": [(reward.name, reward.value) for reward in turn.rewards],
            "finish_reason": enum_name(tokens_pb2.FinishReason, turn.finish_reason),
        }


def _turn_type(arrow: Any) -> Any:
    fields = {
        "turn_id": arrow.string(),
        "num_tokens": arrow.int32(),
        "sampling": arrow.string(),
        "rewards": arrow.map_(arrow.string(), arrow.float64()),
        "finish_reason": arrow.string(),
    }
    return arrow.list_(arrow.struct(fields))


def _columns(sample: trajectory_pb2.Sample) -> list[tuple[str, array[float]]]:
    columns = []
    for column in sample.columns:
        values = array("f")
        values.frombytes(column.values)
        columns.append((column.name, values))
    return columns
