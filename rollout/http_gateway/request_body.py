"""Reads the body of a request, bounded in size and time."""

from __future__ import annotations

import asyncio
import re

from aiohttp import web

from rollout.http_gateway import limits
from rollout.http_gateway.api_error import ApiError
from rollout.http_gateway.config import HttpGatewayConfig

_IDENTITY = ("", "identity")


async def read_body(request: web.Request, config: HttpGatewayConfig) -> bytes:
    """The body of a JSON request.

    Raises:
        ApiError: 415, it is no JSON; 413, it is too large; 408, it came too slowly.
    """
    _check_type(request)
    limit = config.max_body_bytes
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.BODY_TIMEOUT_SECONDS):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        seconds = limits.BODY_TIMEOUT_SECONDS
        message = f"the body did not arrive within {seconds:g} s (body_timeout_seconds)"
        raise ApiError(408, message, code="request_timeout") from None
    return bytes(body)


def _check_type(request: web.Request) -> None:
    if request.headers.get("Content-Encoding", "").lower() not in _IDENTITY:
        message = "Content-Encoding is not supported: send the body as it is"
        raise ApiError(415, message, code="unsupported_media_type")
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    # A web page may post anything else without asking its browser.
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"Content-Type {kind[:100]!r} is not supported: send application/json"
        raise ApiError(415, message, code="unsupported_media_type")


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes (max_body_bytes): send less"
    return ApiError(413, message, code="request_too_large")


_PRINTABLE = re.compile(r"[!-~]{1,4096}")
_OF_ROLLOUT = re.compile(r"[A-Za-z0-9_=-]*\.[0-9a-f]{64}")
"""The form of a rollout's credential."""
_SCHEME = re.compile(r"bearer +", re.IGNORECASE)


def bearer(request: web.Request) -> str | None:
    """What "Authorization: Bearer" or "x-api-key" shows; None: neither is there.

    Of two that of a rollout counts: programs send a login of theirs beside it.

    Raises:
        ApiError: 401, it cannot be a token.
    """
    header, key = request.headers.get("Authorization"), request.headers.get("x-api-key")
    scheme = None if header is None else _SCHEME.match(header)
    shown = key if header is None or scheme is None else header[scheme.end() :].strip()
    if key is not None and _OF_ROLLOUT.fullmatch(key) and not _OF_ROLLOUT.fullmatch(shown or ""):
        shown = key
    if shown is not None and not _PRINTABLE.fullmatch(shown):
        message = "the credential has other characters than printable ASCII, or too many"
        raise ApiError(401, message, code="invalid_api_key")
    return shown


def credential(request: web.Request) -> str:
    """The rollout's credential. Raises `ApiError`: 401, it is missing."""
    shown = bearer(request)
    if shown is None:
        raise ApiError(
            401,
            'no credential: send "Authorization: Bearer <credential>" or "x-api-key: <credential>" '
            "with the credential that POST /rollouts/lease or POST /rollouts returned",
            code="invalid_api_key",
        )
    return shown
