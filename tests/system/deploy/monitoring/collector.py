"""A collector that takes OTLP over HTTP and keeps the spans: the official messages, decoded."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One exported span."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty at a root."""
    links: tuple[str, ...]
    """Span ids of its links."""
    attributes: dict[str, str]


class Collector:
    """Serves in a thread, in its context."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []
        """All that arrived."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self.spans))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """For `otlp_endpoint`."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def named(self, name: str, **attributes: object) -> list[SpanRecord]:
        """The spans of this name that have these attributes of ours."""
        wanted = {f"seamflow.{key}": str(value) for key, value in attributes.items()}
        return [s for s in self.spans if s.name == name and wanted.items() <= s.attributes.items()]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def reached(spans: Iterable[SpanRecord], start: SpanRecord) -> list[SpanRecord]:
    """The spans that parents and links connect with `start`, in either direction."""
    known = {span.span_id: span for span in spans}
    near: dict[str, set[str]] = defaultdict(set)
    for span in known.values():
        for other in {span.parent_id, *span.links} - {""}:
            near[span.span_id].add(other)
            near[other].add(span.span_id)
    found, left = set[str](), {start.span_id}
    while left:
        found |= left
        left = {other for each in left for other in near[each]} - found
    return [known[each] for each in found if each in known]


def _handler(spans: list[SpanRecord]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            spans.extend(_records(pb.ExportTraceServiceRequest.FromString(body)))
            answer = pb.ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    return Handler


def _records(request: pb.ExportTraceServiceRequest) -> Iterable[SpanRecord]:
    for resource in request.resource_spans:
        about = {each.key: each.value.string_value for each in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield SpanRecord(
                    service=about["service.name"],
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    links=tuple(link.span_id.hex() for link in span.links),
                    attributes={
                        each.key: each.value.string_value or str(each.value.int_value)
                        for each in span.attributes
                    },
                )
