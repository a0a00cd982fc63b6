"""Request id and W3C trace context of a call, propagated between services."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["Trace", "begin", "traceparent"]

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[0-9A-Za-z_.:-]{1,64}")
_current: ContextVar[str | None] = ContextVar("seamflow_traceparent", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Identifiers of a call, for logs and errors."""

    request_id: str
    """The caller's `x-request-id`, or a new one."""
    trace_id: str
    """32 hexadecimal digits, shared by everything that one cause set off."""
    span_id: str
    """16 hexadecimal digits, this call alone."""


def begin(metadata: Mapping[str, str | bytes]) -> Trace:
    """Continue the caller's trace, or start one, and make it current in this task.

    Malformed values are replaced: unchecked input must not reach the logs.
    """
    parent = _TRACEPARENT.fullmatch(_text(metadata, "traceparent"))
    request_id = _text(metadata, "x-request-id")
    trace = Trace(
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(8),
        trace_id=parent[1] if parent else secrets.token_hex(16),
        span_id=secrets.token_hex(8),
    )
    _current.set(f"00-{trace.trace_id}-{trace.span_id}-01")
    return trace


def traceparent() -> str | None:
    """The current call's W3C `traceparent`, stored with its results and sent in outgoing calls."""
    return _current.get()


def _text(metadata: Mapping[str, str | bytes], key: str) -> str:
    value = metadata.get(key, "")
    return value if isinstance(value, str) else ""
