"""Validation of requests: names that pass are safe in Redis keys, sizes are bounded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import seconds_of

from services.chassis.errors import ServiceError, invalid_argument
from services.chassis.rpc.fields import not_negative
from services.lib.bounds import (
    MAX_LOGPROB,
    MAX_PAYLOAD_BYTES,
    MAX_REWARD,
    MIN_LOGPROB,
    NAME_RULE,
    is_name,
)
from services.lib.token_bytes import unpack_logprobs
from trajectory_manager.model.tokens import BYTES_PER_TOKEN, Origin, VersionSource

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_COLUMN = re.compile(r"[a-z0-9_]{1,60}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ORIGINS = frozenset(map(int, Origin))
_VERSION_SOURCES = frozenset(map(int, VersionSource))
_POSSIBLE = bytes([0, *range(0x80, 0xC2)])
"""Highest bytes of float32 from -32 to 0, both included; -80 begins with 0xc2."""
_MAX_TEXT = 4096
_MAX_PAGE = 1000
_DEFAULT_PAGE = 100
_MAX_LABELS = 32
_MAX_LABEL_KEY = 63
_MAX_LABEL_VALUE = 256


def run_name(value: str) -> str:
    if not _RUN_NAME.fullmatch(value):
        raise invalid_argument("run_id", value, "1 to 100 of A-Z a-z 0-9 . _ -")
    return value


def name(field: str, value: str) -> str:
    """A required id other than a run_id."""
    if not is_name(value):
        raise invalid_argument(field, value, NAME_RULE)
    return value


@lru_cache(maxsize=1 << 14)
def turn_name(run_id: str, rollout_id: str, turn_id: str) -> tuple[str, str, str]:
    """The three names of a turn; cached, because every append of the turn repeats them."""
    return run_name(run_id), name("rollout_id", rollout_id), name("turn_id", turn_id)


def optional_name(field: str, value: str) -> str:
    return name(field, value) if value else ""


def message_key(field: str, value: str) -> str:
    """The key of a message: a digest, maybe followed by a colon and a digest of its reasoning."""
    digest_of_text, colon, reasoning = value.partition(":")
    if not digest_of_text or (colon and not reasoning) or ":" in reasoning:
        raise invalid_argument(field, value[:80], '"digest", or "digest:digest of its reasoning"')
    return name(field, value)


def column(field: str, value: str) -> str:
    if not _COLUMN.fullmatch(value):
        raise invalid_argument(field, value, "1 to 60 of a-z 0-9 _")
    return value


def labels(field: str, given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """At most 32 labels, sorted by key."""
    if len(given) > _MAX_LABELS:
        raise invalid_argument(field, f"{len(given)} labels", f"at most {_MAX_LABELS}")
    for key, value in given.items():
        if not 1 <= len(key) <= _MAX_LABEL_KEY:
            raise invalid_argument(field, key[:80], f"keys of 1 to {_MAX_LABEL_KEY} characters")
        if len(value) > _MAX_LABEL_VALUE:
            cure = f"values of at most {_MAX_LABEL_VALUE} characters"
            raise invalid_argument(f"{field}[{key}]", f"{value[:20]}...", cure)
    return tuple(sorted(given.items()))


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


def bounded(field: str, value: int, bound: int) -> int:
    """A count between 0 and `bound`."""
    if not 0 <= value <= bound:
        raise invalid_argument(field, value, f"between 0 and {bound}")
    return value


def page_size(given: int) -> int:
    """Entries of a page: 100 by default, at most 1,000 whatever is given."""
    return min(not_negative("page_size", given) or _DEFAULT_PAGE, _MAX_PAGE)


def page(size: int, page_token: str) -> tuple[int, int]:
    """Start and size of a page of a list that only grows at its end."""
    if page_token and not (page_token.isdecimal() and len(page_token) < 18):
        raise invalid_argument("page_token", page_token, "next_page_token of the previous page")
    return int(page_token or 0), page_size(size)


def reward(field: str, value: float) -> float:
    """A number that float32 training survives."""
    if not abs(value) <= MAX_REWARD:  # NaN is not
        raise invalid_argument(field, value, f"a finite number between ±{MAX_REWARD:g}")
    return value


def seconds(field: str, value: Duration) -> float:
    """A duration of at least 0."""
    return not_negative(field, seconds_of(value))


def ids(field: str, data: bytes) -> None:
    """Little-endian int32 ids of at least 0, maybe none."""
    if len(data) % BYTES_PER_TOKEN:
        raise invalid_argument(field, f"{len(data)} bytes", "4 bytes for each id")
    # The highest byte of a little-endian int32 holds its sign.
    if not data[3::4].isascii():
        raise invalid_argument(field, "a negative id", "ids of at least 0")


def packed_tokens(field: str, tokens: tokens_pb2.PackedTokens) -> None:
    """Arrays of equal length, maybe empty: ids of at least 0, possible log-probs; whole spans."""
    token_ids, logprobs = tokens.token_ids, tokens.logprobs
    ids(f"{field}.token_ids", token_ids)
    if len(logprobs) != len(token_ids):
        cure = f"as many as token_ids, which are {len(token_ids)}"
        raise invalid_argument(f"{field}.logprobs", f"{len(logprobs)} bytes", cure)
    # Looks at single values only where a highest byte allows an impossible one.
    if logprobs[3::4].translate(None, _POSSIBLE):
        _check_logprobs(f"{field}.logprobs", unpack_logprobs(logprobs))
    _check_spans(tokens.spans, len(token_ids) // BYTES_PER_TOKEN)


def _check_logprobs(field: str, values: Sequence[float]) -> None:
    for value in values:
        if not MIN_LOGPROB <= value <= MAX_LOGPROB:  # NaN is not
            cure = f"finite numbers between {MIN_LOGPROB:g} and 0"
            raise invalid_argument(field, value, cure)


def _check_spans(spans: Iterable[tokens_pb2.Span], num_tokens: int) -> None:
    """They are contiguous and cover `num_tokens`."""
    end = 0
    for index, span in enumerate(spans):
        length = span.num_tokens
        known = _is_kind(span.origin, span.weight_version, span.version_source, span.server_id)
        if span.start != end or length < 1 or not known:
            raise _invalid_span(f"tokens.spans[{index}]", span, end)
        end += length
    if end != num_tokens:
        raise invalid_argument("tokens.spans", f"{end} tokens", f"spans that cover {num_tokens}")


# Cached: looking at the name would dominate the validation of an append.
@lru_cache(maxsize=4096)
def _is_kind(origin: int, weight_version: int, version_source: int, server_id: str) -> bool:
    """Whether the fields that a span's tokens share are valid."""
    return (
        origin in _ORIGINS
        and version_source in _VERSION_SOURCES
        and weight_version >= 0
        and (not server_id or is_name(server_id))
    )


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
    cure = f"empty, or {NAME_RULE}"
    return invalid_argument(f"{field}.server_id", span.server_id, cure)


def json_object(field: str, value: str) -> str:
    """A JSON object of at most 1 MiB; empty counts as {}."""
    if len(value.encode()) > MAX_PAYLOAD_BYTES:
        raise invalid_argument(
            field, f"{len(value)} characters", f"at most {MAX_PAYLOAD_BYTES} bytes"
        )
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid_argument(field, f"{value[:40]}", "a JSON object")
    return value or "{}"
