"""Interceptor of every call, unary or streamed.

In order: request id and trace for the logs, deadline cap, the caller's release and role, rejection
of malformed bytes, the handler, mapping of errors to codes, metrics of rate, errors and duration.
Exception texts never reach a caller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import structlog
from seamflow.errors import (
    ConflictError,
    InternalError,
    InvalidRequestError,
    PermissionDeniedError,
    SeamflowError,
    decode,
)
from seamflow.release import HEADER, RELEASE, works_with

from services.chassis import metrics
from services.chassis.errors import Reason, ServiceError, deadline_exceeded, shown
from services.chassis.log import get_logger
from services.chassis.rpc import status, tracing
from services.chassis.rpc.permissions import Permissions

Context = grpc.aio.ServicerContext[Any, Any]
Guard = Callable[[Context], AbstractAsyncContextManager[None]]

_PROBES = "/grpc.health."
_UNARY_SECONDS = 900.0
_STREAM_SECONDS = 86_400.0


# A refusal of what this process sent to another service: the caller cannot act on it. A handler
# that passes a caller's own request on converts such errors itself, by `status.from_dependency`.
_OUR_FAULT = (InvalidRequestError, PermissionDeniedError, ConflictError, InternalError)
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class _Malformed:
    """A request that does not parse, for which gRPC would answer UNKNOWN and the parser's text."""


_MALFORMED = _Malformed()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server.

    Args:
        service: metrics prefix, e.g. "scheduler".
        permissions: who may call what; None: everyone everything.
        unary_seconds: longest a unary call may take, regardless of the caller's deadline.
        stream_seconds: the same for streams.
    """

    def __init__(
        self,
        service: str,
        permissions: Permissions | None = None,
        *,
        unary_seconds: float = _UNARY_SECONDS,
        stream_seconds: float = _STREAM_SECONDS,
    ) -> None:
        self._service = service
        self._permissions = permissions
        self._releases = {RELEASE}
        self._unary_seconds = unary_seconds
        self._stream_seconds = stream_seconds
        self._log = get_logger()
        self._wrapped: dict[str, Any] = {}
        self._requests = metrics.counter(
            service, "rpc_requests_total", "Calls answered, by method and code.", ("method", "code")
        )
        self._seconds = metrics.histogram(
            service, "rpc_seconds", "Time to answer a call.", ("method",)
        )
        self._in_flight = metrics.gauge(
            service, "rpc_in_flight", "Calls being answered.", ("method",)
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of this call; a method that does not exist stays UNIMPLEMENTED."""
        method = handler_call_details.method
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            cap = self._stream_seconds if handler.response_streaming else self._unary_seconds
            self._wrapped[method] = _wrapped(handler, self._guard(method, cap))
        return self._wrapped[method]

    def _guard(self, method: str, cap: float) -> Guard:
        seconds, in_flight = self._seconds.labels(method), self._in_flight.labels(method)
        exported = "" if method.startswith(_PROBES) else method

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            metadata = dict(context.invocation_metadata() or ())
            trace = tracing.begin(metadata, exported)
            _bind(trace, method, context)
            started = time.perf_counter()
            code = grpc.StatusCode.UNKNOWN
            in_flight.inc()
            try:
                async with _limited(cap):
                    self._check_caller(method, metadata, context)
                    yield
                code = _code(context, grpc.StatusCode.OK)
            except asyncio.CancelledError:
                code = _why_cancelled(context)
                raise
            except grpc.aio.AbortError:
                code = _code(context, grpc.StatusCode.UNKNOWN)
                raise
            except Exception as error:
                failure = _failure(error, trace)
                code = failure.code
                await _abort(context, failure, trace)
            finally:
                elapsed = time.perf_counter() - started
                in_flight.dec()
                seconds.observe(elapsed)
                self._requests.labels(method, code.name).inc()
                self._log_call(code, elapsed)
                if trace.end is not None:
                    trace.end(code.name)

        return guard

    def _check_caller(
        self, method: str, metadata: dict[str, str | bytes], context: Context
    ) -> None:
        release = metadata.get(HEADER, RELEASE)  # foreign clients send none
        if release not in self._releases:
            self._check_release(str(release))
        if self._permissions is not None:
            self._permissions.check(method, metadata, lambda: _certificate_uri(context))

    def _check_release(self, release: str) -> None:
        """Refuse a release that is too far away; remember one that is not."""
        if not works_with(release):
            raise _too_far_apart(self._service, release)
        self._releases.add(release)

    def _log_call(self, code: grpc.StatusCode, seconds: float) -> None:
        write = self._log.debug if code is grpc.StatusCode.OK else self._log.info
        write("call", code=code.name, duration_ms=round(seconds * 1e3, 3))


def _too_far_apart(service: str, release: str) -> ServiceError:
    message = (
        f"the caller is of seamflow release {shown(release)}, this {service} of {RELEASE}: "
        "releases work together if their minor versions differ by one at most; update the older one"
    )
    metadata = {"caller_release": release, "server_release": RELEASE}
    reason = Reason.RELEASES_TOO_FAR_APART
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, reason, message, metadata=metadata)


def _bind(trace: tracing.Trace, method: str, context: Context) -> None:
    structlog.contextvars.bind_contextvars(
        request_id=trace.request_id,
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        method=method,
        peer=context.peer(),
    )


def _certificate_uri(context: Context) -> str | None:
    """The SPIFFE ID of the client certificate that the handshake has verified."""
    return next((uri.decode() for uri in context.auth_context().get("peer_spiffe_id", ())), None)


def _failure(error: Exception, trace: tracing.Trace) -> ServiceError:
    """The error to answer with, for one that a handler raised."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        error = decode(error)
    if isinstance(error, SeamflowError) and type(error) not in (*_OUR_FAULT, SeamflowError):
        return status.from_dependency(error)
    get_logger().error("call_failed", exc_info=error)
    message = f"internal error; see the logs of request {trace.request_id}"
    return ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, message)


async def _abort(context: Context, failure: ServiceError, trace: tracing.Trace) -> None:
    failure.metadata.setdefault("request_id", trace.request_id)
    failure.metadata.setdefault("trace_id", trace.trace_id)
    trailing = ((status.DETAILS_KEY, status.encode(failure)),)
    await context.abort(failure.code, failure.message, trailing)


@asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise deadline_exceeded(f"calls to this server may take at most {seconds:g} s") from error


def _why_cancelled(context: Context) -> grpc.StatusCode:
    left = context.time_remaining()
    if left is not None and left <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


def _code(context: Context, otherwise: grpc.StatusCode) -> grpc.StatusCode:
    code = context.code()
    return code if isinstance(code, grpc.StatusCode) else _CODES.get(code, otherwise)


def _wrapped(handler: Any, guard: Guard) -> Any:
    """A handler of the same arity whose every step runs inside `guard`."""
    serialize = _serializer(handler.response_serializer)
    if handler.request_streaming and handler.response_streaming:
        make, behaviour = grpc.stream_stream_rpc_method_handler, handler.stream_stream
    elif handler.request_streaming:
        make, behaviour = grpc.stream_unary_rpc_method_handler, handler.stream_unary
    elif handler.response_streaming:
        make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
    else:
        make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
    wrap = _streamed if handler.response_streaming else _single
    check = _parsed_stream if handler.request_streaming else _parsed
    return make(
        wrap(behaviour, check, serialize, guard),
        request_deserializer=_deserializer(handler.request_deserializer),
        response_serializer=serialize,
    )


def _single(behaviour: Any, check: Any, serialize: Any, guard: Guard) -> Any:
    async def call(request: Any, context: Context) -> Any:
        async with guard(context):
            # Serialized here, so that a response of the wrong type is an ordinary internal error.
            return serialize(await behaviour(check(request), context))

    return call


def _streamed(behaviour: Any, check: Any, serialize: Any, guard: Guard) -> Any:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        async with guard(context):
            responses = behaviour(check(request), context)
            if not hasattr(responses, "__aiter__"):
                await responses  # a handler that writes through its context
                return
            async with aclosing(responses):
                async for response in responses:
                    yield serialize(response)

    return call


def _parsed(request: Any) -> Any:
    if request is _MALFORMED:
        message = "the bytes are not a message of this method's request type"
        raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, Reason.MALFORMED_MESSAGE, message)
    return request


async def _parsed_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _parsed(request)


def _deserializer(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def tolerant(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:
            return _MALFORMED

    return tolerant


def _serializer(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    def idempotent(response: Any) -> bytes:
        if serialize is None or isinstance(response, bytes):
            return response  # type: ignore[no-any-return]
        return serialize(response)

    return idempotent
