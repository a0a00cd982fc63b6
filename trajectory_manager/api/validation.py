"""Validation of requests: names that pass are safe in Redis keys, sizes are bounded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from functools import lru_cache

from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2

from services.chassis.errors import Reason, ServiceError, failed_precondition, invalid_argument
from trajectory_manager.model.records import (
    Durability,
    Replay,
    ReplayStrategy,
    RunConfig,
    StalenessPolicy,
)
from trajectory_manager.model.token_bytes import unpack_logprobs
from trajectory_manager.model.tokens import BYTES_PER_TOKEN, Origin, Span, VersionSource

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,199}")
_COLUMN = re.compile(r"[a-z0-9_]{1,60}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ORIGINS = frozenset(map(int, Origin))
_VERSION_SOURCES = frozenset(map(int, VersionSource))
_MAX_TEXT = 4096
_MAX_GROUP_SIZE = 4096
_MAX_PAGE = 1000
_DEFAULT_PAGE = 100
_MAX_PAYLOAD_BYTES = 1 << 20
_MAX_INT32 = 2**31 - 1


def run_name(value: str) -> str:
    """A run_id."""
    if not _RUN_NAME.fullmatch(value):
        raise invalid_argument("run_id", value, "1 to 100 of A-Z a-z 0-9 . _ -")
    return value


def name(field: str, value: str) -> str:
    """A required id other than a run_id."""
    if not _NAME.fullmatch(value):
        raise invalid_argument(field, value, "1 to 200 of A-Z a-z 0-9 . _ ~ : @ + = / -")
    return value


@lru_cache(maxsize=1 << 14)
def turn_name(run_id: str, rollout_id: str, turn_id: str) -> tuple[str, str, str]:
    """The three names of a turn; cached, because every append of the turn repeats them."""
    return run_name(run_id), name("rollout_id", rollout_id), name("turn_id", turn_id)


def optional_name(field: str, value: str) -> str:
    """An id, or empty."""
    return name(field, value) if value else ""


def digest(field: str, value: str) -> str:
    """A SHA-256 in lower-case hex."""
    if not _DIGEST.fullmatch(value):
        raise invalid_argument(field, value, "a SHA-256 as 64 lower-case hex digits")
    return value


def text(field: str, value: str) -> str:
    """A text of at most 4,096 characters."""
    if len(value) > _MAX_TEXT:
        raise invalid_argument(field, f"{value[:20]}...", f"at most {_MAX_TEXT} characters")
    return value


def positive(field: str, value: int) -> int:
    """An integer of at least 1."""
    if value < 1:
        raise invalid_argument(field, value, "at least 1")
    return value


def not_negative(field: str, value: int) -> int:
    """An integer of at least 0."""
    if value < 0:
        raise invalid_argument(field, value, "at least 0")
    return value


def bounded(field: str, value: int, bound: int) -> int:
    """A count between 0 and `bound`."""
    if not 0 <= value <= bound:
        raise invalid_argument(field, value, f"between 0 and {bound}")
    return value


def page(page_size: int, page_token: str) -> tuple[int, int]:
    """Start and size limit of a page of a list that only grows at its end."""
    limit = bounded("page_size", page_size, _MAX_PAGE) or _DEFAULT_PAGE
    if page_token and not (page_token.isdecimal() and len(page_token) < 18):
        raise invalid_argument("page_token", page_token, "next_page_token of the previous page")
    return int(page_token or 0), limit


def finite(field: str, value: float) -> float:
    """A number that is neither infinite nor NaN."""
    if not math.isfinite(value):
        raise invalid_argument(field, value, "a finite number")
    return value


def seconds(field: str, value: Duration) -> float:
    """A duration of at least 0."""
    length = value.seconds + value.nanos / 1e9
    if length < 0:
        raise invalid_argument(field, length, "at least 0 s")
    return length


def packed_tokens(field: str, ids: bytes, logprobs: bytes) -> None:
    """Arrays as bytes, of equal length, maybe empty; ids of at least 0 and finite log-probs."""
    if len(ids) % BYTES_PER_TOKEN:
        raise invalid_argument(f"{field}.token_ids", f"{len(ids)} bytes", "4 bytes for each id")
    if len(logprobs) != len(ids):
        cure = f"as many as token_ids, which are {len(ids)}"
        raise invalid_argument(f"{field}.logprobs", f"{len(logprobs)} bytes", cure)
    # The highest byte of a little-endian int32 holds its sign.
    if not ids[3::4].isascii():
        raise invalid_argument(f"{field}.token_ids", "a negative id", "ids of at least 0")
    if not _finite(logprobs):
        raise invalid_argument(f"{field}.logprobs", "NaN or infinite", "finite numbers")


def _finite(floats: bytes) -> bool:
    """Whether no float32 is infinite or NaN: their exponents are all ones."""
    highest = floats[3::4]
    if b"\x7f" not in highest and b"\xff" not in highest:
        return True
    return all(map(math.isfinite, unpack_logprobs(floats)))


def spans(messages: Iterable[tokens_pb2.Span], num_tokens: int) -> tuple[Span, ...]:
    """Contiguous spans that cover `num_tokens`."""
    found, end = list[Span](), 0
    for index, message in enumerate(messages):
        start, length = message.start, message.num_tokens
        kind = _kind(
            message.origin, message.weight_version, message.version_source, message.server_id
        )
        if start != end or length < 1 or kind is None:
            raise _invalid_span(f"tokens.spans[{index}]", message, end)
        found.append(Span(length, *kind))
        end += length
    if end != num_tokens:
        raise invalid_argument("tokens.spans", f"{end} tokens", f"spans that cover {num_tokens}")
    return tuple(found)


# Cached: enum lookups would dominate the validation of an append.
@lru_cache(maxsize=4096)
def _kind(
    origin: int, weight_version: int, version_source: int, server_id: str
) -> tuple[Origin, int, VersionSource, str] | None:
    """The common fields of a span's tokens; None if they are invalid."""
    is_valid = (
        origin in _ORIGINS
        and version_source in _VERSION_SOURCES
        and weight_version >= 0
        and (not server_id or _NAME.fullmatch(server_id) is not None)
    )
    if not is_valid:
        return None
    return Origin(origin), weight_version, VersionSource(version_source), server_id


def _invalid_span(field: str, span: tokens_pb2.Span, end: int) -> ServiceError:
    """The error of a span that must start at `end`."""
    if span.start != end or span.num_tokens < 1:
        given = f"[{span.start}, {span.start + span.num_tokens})"
        return invalid_argument(field, given, f"start {end} and at least one token")
    if span.origin not in _ORIGINS:
        return invalid_argument(f"{field}.origin", span.origin, "ENVIRONMENT or POLICY")
    if span.version_source not in _VERSION_SOURCES:
        return invalid_argument(f"{field}.version_source", span.version_source, "a known one")
    if span.weight_version < 0:
        return invalid_argument(f"{field}.weight_version", span.weight_version, "at least 0")
    cure = "empty, or 1 to 200 of A-Z a-z 0-9 . _ ~ : @ + = / -"
    return invalid_argument(f"{field}.server_id", span.server_id, cure)


def json_object(field: str, value: str) -> str:
    """A JSON object of at most 1 MiB; empty counts as {}."""
    if len(value.encode()) > _MAX_PAYLOAD_BYTES:
        raise invalid_argument(
            field, f"{len(value)} characters", f"at most {_MAX_PAYLOAD_BYTES} bytes"
        )
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid_argument(field, f"{value[:40]}", "a JSON object")
    return value or "{}"


def run_config(config: RunConfig, store: Durability) -> None:
    """Rules of a run, and whether the store gives their durability."""
    positive("config.group_size", bounded("config.group_size", config.group_size, _MAX_GROUP_SIZE))
    positive("config.groups_per_step", config.groups_per_step)
    not_negative("config.max_staleness", config.max_staleness)
    text("config.zero_variance_reward", config.zero_variance_reward)
    if not 0 < config.lease_seconds <= 86400:
        raise invalid_argument(
            "config.lease_seconds", config.lease_seconds, "more than 0, at most 86400"
        )
    _run_bounds(config)
    if config.replay is not None:
        _replay(config.replay)
    if config.durability > store:
        raise _unsupported(
            f"durability {config.durability.name} is more than this store gives ({store.name}): "
            "start the trajectory manager with durability = "
            f'"{config.durability.name.lower()}" on a store that gives it'
        )


def _run_bounds(config: RunConfig) -> None:
    bounded("config.num_extra_samples", config.num_extra_samples, _MAX_GROUP_SIZE)
    for field in ("max_deliveries", "max_stored_tokens", "retention_steps"):
        not_negative(f"config.{field}", getattr(config, field))
    if config.fifo_window != 0 and config.fifo_window < config.groups_per_step:
        cure = f"0 (off), or at least groups_per_step, which is {config.groups_per_step}"
        raise invalid_argument("config.fifo_window", config.fifo_window, cure)
    waits = config.staleness_policy is StalenessPolicy.WAIT
    if not math.isfinite(config.publish_wait_seconds) or (config.publish_wait_seconds > 0) != waits:
        cure = "more than 0 with staleness_policy WAIT, and 0 without"
        raise invalid_argument("config.publish_wait_seconds", config.publish_wait_seconds, cure)
    for column in config.required_columns:
        if not _COLUMN.fullmatch(column):
            raise invalid_argument("config.required_columns", column, "1 to 60 of a-z 0-9 _")
    if len(set(config.required_columns)) < len(config.required_columns):
        raise invalid_argument("config.required_columns", config.required_columns, "each one once")


def _replay(replay: Replay) -> None:
    positive("config.replay.groups_per_step", replay.groups_per_step)
    if replay.capacity_groups < replay.groups_per_step:
        cure = f"at least groups_per_step, which is {replay.groups_per_step}"
        raise invalid_argument("config.replay.capacity_groups", replay.capacity_groups, cure)
    if replay.strategy is ReplayStrategy.REWARD:
        name("config.replay.reward_name", replay.reward_name)
        if not (math.isfinite(replay.temperature) and replay.temperature > 0):
            raise invalid_argument("config.replay.temperature", replay.temperature, "more than 0")


def _unsupported(message: str) -> ServiceError:
    return failed_precondition(Reason.UNSUPPORTED, message)
