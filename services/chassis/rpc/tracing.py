"""Trace context of calls, and the spans of what a process does.

A trace context is continued from call to call in any case, for logs and errors. Spans are exported
only where `otlp_endpoint` is set: `otlp.py`, which is not imported otherwise.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seamflow import trace_context
from seamflow.trace_context import ids

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError

if TYPE_CHECKING:
    from services.chassis.rpc.otlp import SpanExport

_REQUEST_ID = re.compile(r"[0-9A-Za-z_.:-]{1,64}")
_NOTHING = nullcontext()
_export: SpanExport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Identifiers of a call, for logs and errors."""

    request_id: str
    """The caller's `x-request-id`, or a new one."""
    trace_id: str
    """32 hexadecimal digits, shared by everything that one cause set off."""
    span_id: str
    """16 hexadecimal digits, this call alone."""
    end: Callable[[str], None] | None = None
    """Ends the exported span, with the call's code; None: nothing is exported."""


def begin(metadata: Mapping[str, str | bytes], method: str = "", parent: str = "") -> Trace:
    """Continue the caller's trace, or else that of `parent`, and make it current in this task.

    Malformed values are replaced: unchecked input must not reach the logs.
    """
    request_id = _text(metadata, "x-request-id")
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = secrets.token_hex(8)
    given = ids(_text(metadata, trace_context.HEADER)) or ids(parent)
    if _export is not None and method:
        trace_id, span_id, end = _export.call(method, given)
    else:
        trace_id, span_id, end = given[0] if given else secrets.token_hex(16), None, None
    trace = Trace(
        request_id=request_id,
        trace_id=trace_id,
        span_id=span_id or secrets.token_hex(8),
        end=end,
    )
    trace_context.current.set(f"00-{trace.trace_id}-{trace.span_id}-01")
    return trace


def traceparent() -> str | None:
    """The current call's W3C `traceparent`, stored with its results and sent in outgoing calls."""
    return trace_context.current.get()


def span(
    name: str,
    *,
    parent: str | None = None,
    links: Iterable[str] = (),
    root: str | None = None,
    **attributes: str | int,
) -> AbstractContextManager[None]:
    """A span of this process, current in its context.

    Args:
        name: what is done.
        parent: a traceparent to continue; None: the current one, if there is one.
        links: traceparents of other causes.
        root: its own traceparent, for the first span of a trace; `parent` is ignored.
        attributes: values by name, without secrets, texts and tokens.
    """
    if _export is not None:
        return _export.span(name, ids(parent or traceparent() or ""), links, root, attributes)
    given = root or parent
    return _NOTHING if given is None else _continued(given)


def rollout_span(
    name: str, run_id: str, rollout_id: str, **attributes: str | int
) -> AbstractContextManager[None]:
    """A span of work on a rollout, linked to the trace of the rollout if it is in another one."""
    if _export is None:
        return _NOTHING
    first = trace_context.of_rollout(run_id, rollout_id)
    cause = ids(traceparent() or "")
    links = () if ids(first)[:1] == cause[:1] else (first,)
    given = {"run_id": run_id, "rollout_id": rollout_id, **attributes}
    return _export.span(name, cause, links, None, given)


def add_links(traceparents: Iterable[str]) -> None:
    """Link the current span to others, once to each trace."""
    if _export is not None:
        _export.add_links(traceparents)


@contextmanager
def exporting(config: ServerConfig, service: str) -> Iterator[None]:
    """Export the spans of this context if `otlp_endpoint` is set.

    Raises:
        ConfigError: the exporter is not installed, or the address is none.
    """
    global _export  # noqa: PLW0603 -- one exporter per process, read by every call
    if config.otlp_endpoint is None:
        yield
        return
    _export = _make_export(config, service)
    try:
        yield
    finally:
        export, _export = _export, None
        export.close()


def _make_export(config: ServerConfig, service: str) -> SpanExport:
    try:
        from services.chassis.rpc.otlp import SpanExport
    except ModuleNotFoundError as error:
        message = f"otlp_endpoint needs the package of {error.name!r}: pip install 'seamflow[otel]'"
        raise ConfigError(message) from error
    return SpanExport(config, service)


@contextmanager
def _continued(parent: str) -> Iterator[None]:
    token = trace_context.current.set(parent)
    try:
        yield
    finally:
        trace_context.current.reset(token)


def _text(metadata: Mapping[str, str | bytes], key: str) -> str:
    value = metadata.get(key, "")
    return value if isinstance(value, str) else ""
