"""The bearer of a request: a rollout's credential, or the agents' token."""

from __future__ import annotations

import re

from aiohttp import web

from rollout.http_gateway.api_error import ApiError

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
