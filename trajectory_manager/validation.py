"""What requests may hold. Everything that passes is safe as a Redis key and bounded in size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2

from services.chassis.errors import Reason, ServiceError, failed_precondition, invalid_argument
from trajectory_manager.records import Durability, RunConfig, StalenessPolicy

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_TEXT = 4096
_MAX_GROUP_SIZE = 4096
_MAX_PAYLOAD_BYTES = 1 << 20
_MAX_INT32 = 2**31 - 1


def run_name(value: str) -> str:
    """A run_id."""
    if not _RUN_NAME.fullmatch(value):
        raise invalid_argument("run_id", value, "1 to 100 of A-Z a-z 0-9 . _ -")
    return value


def name(field: str, value: str) -> str:
    """Any other id that must be there."""
    if not _NAME.fullmatch(value):
        raise invalid_argument(field, value, "1 to 200 of A-Z a-z 0-9 . _ ~ : @ + = / -")
    return value


def optional_name(field: str, value: str) -> str:
    """An id, or empty."""
    return name(field, value) if value else ""


def digest(field: str, value: str) -> str:
    """A SHA-256 in lower-case hex."""
    if not _DIGEST.fullmatch(value):
        raise invalid_argument(field, value, "a SHA-256 as 64 lower-case hex digits")
    return value


def text(field: str, value: str) -> str:
    """A short text for people or digests."""
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


def tokens(message: tokens_pb2.Tokens) -> None:
    """Arrays of equal length, finite log-probs, contiguous spans that cover all tokens."""
    num_tokens = len(message.token_ids)
    if num_tokens == 0:
        raise invalid_argument("tokens.token_ids", [], "at least one token")
    if len(message.logprobs) != num_tokens:
        cure = f"as many as token_ids, which are {num_tokens}"
        raise invalid_argument("tokens.logprobs", f"{len(message.logprobs)} values", cure)
    # The sum of finite float32 is a finite float64; anything else poisons it.
    if not math.isfinite(sum(message.logprobs)):
        raise invalid_argument("tokens.logprobs", "NaN or infinite", "finite numbers")
    if min(message.token_ids) < 0:
        raise invalid_argument("tokens.token_ids", min(message.token_ids), "ids of at least 0")
    _spans(message.spans, num_tokens)


def _spans(spans: Iterable[tokens_pb2.Span], num_tokens: int) -> None:
    end = 0
    for index, span in enumerate(spans):
        field = f"tokens.spans[{index}]"
        if span.start != end or span.num_tokens < 1:
            given = f"[{span.start}, {span.start + span.num_tokens})"
            raise invalid_argument(field, given, f"start {end} and at least one token")
        if span.origin not in (tokens_pb2.ORIGIN_ENVIRONMENT, tokens_pb2.ORIGIN_POLICY):
            raise invalid_argument(f"{field}.origin", span.origin, "ENVIRONMENT or POLICY")
        if span.version_source not in tokens_pb2.VersionSource.values():
            raise invalid_argument(f"{field}.version_source", span.version_source, "a known one")
        not_negative(f"{field}.weight_version", span.weight_version)
        optional_name(f"{field}.server_id", span.server_id)
        end += span.num_tokens
    if end != num_tokens:
        raise invalid_argument("tokens.spans", f"{end} tokens", f"spans that cover {num_tokens}")


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
    """Rules that can be kept, on a store that can keep them."""
    positive("config.group_size", bounded("config.group_size", config.group_size, _MAX_GROUP_SIZE))
    positive("config.groups_per_step", config.groups_per_step)
    not_negative("config.max_staleness", config.max_staleness)
    text("config.zero_variance_reward", config.zero_variance_reward)
    if not 0 < config.lease_seconds <= 86400:
        raise invalid_argument(
            "config.lease_seconds", config.lease_seconds, "more than 0, at most 86400"
        )
    if config.staleness_policy is StalenessPolicy.WAIT:
        raise _unsupported("staleness_policy WAIT is not there yet: use DROP, MASK or WITHHOLD")
    if config.durability > store:
        raise _unsupported(
            f"durability {config.durability.name} is more than this store gives ({store.name}): "
            "start the trajectory manager on a store with appendonly yes and appendfsync always"
        )


def _unsupported(message: str) -> ServiceError:
    return failed_precondition(Reason.UNSUPPORTED, message)
