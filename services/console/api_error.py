"""What the API answers when it cannot do what was asked."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web
from seamflow.errors import (
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    SeamflowError,
    UnavailableError,
)

_STATUS: tuple[tuple[type[SeamflowError], int, str], ...] = (
    (InvalidRequestError, 400, "correct the link or the filter"),
    (NotFoundError, 404, "it may have been deleted: go back to the list"),
    (PermissionDeniedError, 502, "give the console the identity or token `console`"),
    (UnavailableError, 503, "see `seamflow why-stuck`; the page tries again"),
    (DeadlineError, 504, "the service is busy; the page tries again"),
)


@dataclass(eq=False)
class ApiError(Exception):
    """An error for the page."""

    status: int
    message: str
    cure: str

    def response(self) -> web.Response:
        error = {"message": self.message, "cure": self.cure}
        return web.json_response({"error": error}, status=self.status)


def from_seamflow(error: SeamflowError) -> ApiError:
    for kind, status, cure in _STATUS:
        if isinstance(error, kind):
            return ApiError(status, str(error), cure)
    return ApiError(502, str(error), "see the log of the service")
