"""The web application: routes, and errors in the form of the route's dialect."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web
from seamflow import trace_context
from seamflow.errors import SeamflowError

from rollout.http_gateway import limits
from rollout.http_gateway.api_error import ApiError, from_seamflow
from rollout.http_gateway.dialects.anthropic_messages import AnthropicMessages, anthropic_error
from rollout.http_gateway.dialects.chat_completions import ChatCompletions
from rollout.http_gateway.dialects.dialect import openai_error
from rollout.http_gateway.dialects.responses import Responses
from rollout.http_gateway.dialects.token_generate import TokenGenerate
from rollout.http_gateway.model_routes import ModelRoutes
from rollout.http_gateway.rollout_routes import RolloutRoutes
from rollout.http_gateway.turn_routes import TurnRoutes
from services.chassis import metrics
from services.chassis.errors import ServiceError
from services.chassis.log import get_logger
from services.chassis.rpc import tracing
from services.lib.http.http_server import ForeignRequestError, check_source

if TYPE_CHECKING:
    from rollout.http_gateway.config import HttpGatewayConfig

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = get_logger()
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,199}")
_STATUS_CLIENT_LEFT = 499
_CALLS = metrics.counter(
    "http_gateway", "calls_total", "Answered requests.", labels=("route", "status")
)
_SECONDS = metrics.histogram(
    "http_gateway", "call_seconds", "Duration of requests.", labels=("route",)
)
_OPEN = metrics.gauge("http_gateway", "open_calls", "Requests in progress.")


def application(
    config: HttpGatewayConfig, turns: TurnRoutes, models: ModelRoutes, rollouts: RolloutRoutes
) -> web.Application:
    app = web.Application(middlewares=[_Middleware(config)])
    # Names have slashes, which some proxies decode.
    rollout = "/rollouts/{rollout_id:.+}"
    app.add_routes(
        [
            web.post("/rollouts/lease", rollouts.lease),
            web.post("/rollouts", rollouts.start),
            web.post(f"{rollout}/extend", rollouts.extend),
            web.post(f"{rollout}/finish", rollouts.finish),
            web.post(f"{rollout}/v1/chat/completions", turns.handler(ChatCompletions())),
            web.post(f"{rollout}/v1/responses", turns.handler(Responses())),
            web.post(f"{rollout}/v1/messages", turns.handler(AnthropicMessages())),
            web.post(f"{rollout}/v1/messages/count_tokens", models.count_tokens()),
            web.post(f"{rollout}/inference/v1/generate", turns.handler(TokenGenerate())),
            web.get(f"{rollout}/v1/models", models.models),
            web.get(f"{rollout}/v1/models/{{model}}", models.model),
        ]
    )
    return app


class _Middleware:
    """Counts requests, limits those in progress, and gives errors their form."""

    __middleware_version__ = 1

    def __init__(self, config: HttpGatewayConfig) -> None:
        self._config = config
        self._num_open = 0

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        status = _STATUS_CLIENT_LEFT
        trace = tracing.begin(request.headers, f"{request.method} {route}", self._parent(request))
        self._num_open += 1
        try:
            with _OPEN.track_inprogress(), _SECONDS.labels(route).time():
                response = await self._answered(request, handler)
            status = response.status
            return response
        finally:
            self._num_open -= 1
            _CALLS.labels(route, status).inc()
            if trace.end is not None:
                trace.end(str(status))

    def _parent(self, request: web.Request) -> str:
        """The trace of the rollout, for a caller that sends none."""
        rollout_id = request.match_info.get("rollout_id")
        return (
            "" if rollout_id is None else trace_context.of_rollout(self._config.run_id, rollout_id)
        )

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check(request)
            return await handler(request)
        except ApiError as error:
            return _error_response(request, error)
        except ForeignRequestError as error:
            return _error_response(request, ApiError(403, str(error), code=error.code))
        except SeamflowError as error:
            return _error_response(request, from_seamflow(error))
        except ServiceError as error:  # of this gateway's own budget
            return _error_response(request, _of_budget(error))
        except web.HTTPException as error:
            return _error_response(request, _of_aiohttp(request, error))
        except ConnectionError:
            raise  # the client has left
        except Exception:
            _log.exception("request_failed", path=request.path[:200])
            message = "internal error: see the log of the HTTP gateway"
            return _error_response(request, ApiError(500, message, code="internal_error"))

    def _check(self, request: web.Request) -> None:
        check_source(request.headers, request.scheme, self._config, "http_gateway")
        if self._num_open > limits.MAX_OPEN_CALLS:
            message = f"{limits.MAX_OPEN_CALLS} calls are in progress (max_open_calls): try later"
            raise ApiError(429, message, code="too_many_calls", retry_after=1.0)
        rollout_id = request.match_info.get("rollout_id")
        if rollout_id is not None and not _ROLLOUT_ID.fullmatch(rollout_id):
            message = f"{rollout_id[:80]!r} is no rollout: take the id of its lease"
            raise ApiError(404, message, code="not_found")


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    form = anthropic_error if "/v1/messages" in request.path else openai_error
    response = web.json_response(form(error), status=error.status, headers=error.headers())
    if not request.body_exists or request.content.at_eof():
        return response
    response.force_close()  # the rest of the body is not read
    return response


def _of_budget(error: ServiceError) -> ApiError:
    retry_after = error.retry_after
    return ApiError(429, error.message, code="too_many_calls", retry_after=retry_after)


def _of_aiohttp(request: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 405:
        allowed = error.headers.get("Allow", "")
        message = f"{request.method} is not allowed on {request.path[:200]}: use {allowed}"
        return ApiError(405, message, code="method_not_allowed")
    message = f"there is no {request.path[:200]}: see the routes of the HTTP gateway in its docs"
    return ApiError(error.status, message, code="not_found")
