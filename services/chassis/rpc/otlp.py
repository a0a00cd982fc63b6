"""Export of spans over OTLP, by the official packages (extra `otel`).

Their gRPC interceptors are not used: they halve the rate of calls. A span starts in our interceptor
(`call`) and around the few pieces of work that matter (`span`). Export runs in a thread; a
collector that is slow or gone costs spans, never a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from seamflow import trace_context
from seamflow.trace_context import ids

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from services.chassis.version import version

MAX_LINKS = 1024
"""Links of a span: a step links to as many rollouts at most."""
_EXPORT_SECONDS = 5.0
_FLUSH_MS = 2000
_FAULTS = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE", "DEADLINE_EXCEEDED"})
_current_span: ContextVar[Span | None] = ContextVar("seamflow_span", default=None)


class SpanExport:
    """Makes spans of one process and sends those of the sampled traces."""

    def __init__(self, config: ServerConfig, service: str) -> None:
        endpoint = _traces_url(str(config.otlp_endpoint))
        resource = {
            "service.name": f"seamflow.{service}",
            "service.instance.id": config.instance,
            "service.version": version(),
        }
        self._ids = _Ids()
        self._provider = TracerProvider(
            # By trace id alone, so that all processes keep the same traces.
            sampler=TraceIdRatioBased(config.otlp_sample_ratio),
            resource=Resource.create(resource),
            id_generator=self._ids,
            span_limits=SpanLimits(max_links=MAX_LINKS),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("seamflow")

    def call(self, method: str, parent: tuple[str, ...]) -> tuple[str, str, Callable[[str], None]]:
        """Start the span of a call; returns its trace id, span id and what ends it."""
        service, _, rpc = method.strip("/").rpartition("/")
        span = self._tracer.start_span(
            method.strip("/"),
            _context(parent),
            SpanKind.SERVER,
            {"rpc.system": "grpc", "rpc.service": service, "rpc.method": rpc},
        )
        _current_span.set(span)
        trace_id, span_id = _hex(span.get_span_context())

        def end(code: str) -> None:
            span.set_attribute("rpc.response.status_code", code)
            if code in _FAULTS:
                span.set_status(Status(StatusCode.ERROR, code))
            span.end()

        return trace_id, span_id, end

    @contextmanager
    def span(
        self,
        name: str,
        parent: tuple[str, ...],
        links: Iterable[str],
        root: str | None,
        attributes: Mapping[str, str | int],
    ) -> Iterator[None]:
        if root is not None:
            self._ids.next, parent = ids(root), ()
        span = self._tracer.start_span(
            name,
            _context(parent),
            SpanKind.INTERNAL,
            {f"seamflow.{key}": value for key, value in attributes.items()},
            [Link(_span_context(ids(each))) for each in links if ids(each)],
        )
        trace_id, span_id = _hex(span.get_span_context())
        set_span = _current_span.set(span)
        set_parent = trace_context.current.set(f"00-{trace_id}-{span_id}-01")
        try:
            yield
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            trace_context.current.reset(set_parent)
            _current_span.reset(set_span)
            span.end()

    def add_links(self, traceparents: Iterable[str]) -> None:
        span = _current_span.get()
        if span is not None:
            for found in {ids(each) for each in traceparents} - {()}:
                span.add_link(_span_context(found))

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


class _Ids(IdGenerator):
    """Random ids, but for the root span of a rollout, whose ids follow from its name."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.next: tuple[str, ...] = ()
        """Ids of the span that is started next, by the same thread."""

    def generate_trace_id(self) -> int:
        return int(self.next[0], 16) if self.next else self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        taken, self.next = self.next, ()
        return int(taken[1], 16) if taken else self._random.generate_span_id()


def _traces_url(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        message = f"otlp_endpoint is {endpoint!r}: give a URL such as http://collector:4318"
        raise ConfigError(message)
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def _context(parent: tuple[str, ...]) -> Context:
    # Never the ambient context of OpenTelemetry, which is not ours.
    return (
        set_span_in_context(NonRecordingSpan(_span_context(parent)), Context())
        if parent
        else Context()
    )


def _span_context(found: tuple[str, ...]) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(found[0], 16), int(found[1], 16), True, flags)


def _hex(context: SpanContext) -> tuple[str, str]:
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"
