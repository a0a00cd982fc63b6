"""The web application: pages, API, and who may request them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import grpc
from aiohttp import web
from seamflow.errors import SeamflowError, decode

from services.chassis.log import get_logger
from services.console.api_error import ApiError, from_seamflow
from services.console.config import ConsoleConfig
from services.lib.http.http_server import ForeignRequestError, check_source

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STATIC = Path(__file__).parent / "static"
_log = get_logger()
_HEADERS = {
    # Model output is untrusted text: nothing from another origin is loaded, run or framed.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_COOKIE_SECONDS = 30 * 86_400
_WELCOME = """<!doctype html><html lang="en"><meta charset="utf-8"><title>seamflow console</title>
<meta http-equiv="refresh" content="0;url=./"><p><a href="./">The console</a></p></html>"""
_NO_WAY_IN = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>seamflow console: link needed</title>
<main><h1>This page needs its link</h1><p>{reason}</p>
<p>Open the link that the console printed when it was started. It ends in
<code>/?token=…</code>:</p><ul>
<li><code>seamflow train</code> and <code>seamflow console</code> print it;
<code>seamflow console --help</code> says how to get it again.</li>
<li>In containers the token is the secret <code>console_access_token</code>.</li></ul></main></html>
"""


def application(
    config: ConsoleConfig, login: Login, routes: Sequence[web.RouteDef]
) -> web.Application:
    """All routes; `routes` are those of the API. The static pages hold no data of a run."""

    async def index(request: web.Request) -> web.StreamResponse:
        if "token" in request.query:
            return login.enter(request)
        return web.FileResponse(STATIC / "index.html")

    async def icon(_: web.Request) -> web.StreamResponse:
        return web.Response(status=204)

    app = web.Application(middlewares=[_Middleware(config, login)])
    app.on_response_prepare.append(_add_headers)
    app.add_routes(
        [*routes, web.get("/", index), web.get("/favicon.ico", icon), web.static("/static", STATIC)]
    )
    return app


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    cached = "no-store" if _is_api(request) or "token" in request.query else "no-cache"
    response.headers.update({**_HEADERS, "Cache-Control": cached})


def _is_api(request: web.Request) -> bool:
    return request.path.startswith("/api/")


class _Middleware:
    """Refuses unauthenticated requests, and turns errors into JSON."""

    __middleware_version__ = 1

    def __init__(self, config: ConsoleConfig, login: Login) -> None:
        self._config = config
        self._login = login

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_source(request.headers, request.scheme, self._config, "console")
            if _is_api(request) and not self._login.knows(request):
                return _unauthenticated().response()
            return await handler(request)
        except ForeignRequestError as error:
            return ApiError(403, str(error), "request the console by its own address").response()
        except ApiError as error:
            return error.response()
        except SeamflowError as error:
            return from_seamflow(error).response()
        except grpc.aio.AioRpcError as error:
            return from_seamflow(decode(error)).response()
        except web.HTTPException as error:
            return _of_aiohttp(request, error)
        except ConnectionError:
            raise  # the page was closed
        except Exception:
            _log.exception("request_failed", path=request.path[:200])
            return ApiError(500, "internal error", "see the log of the console").response()


def _unauthenticated() -> ApiError:
    return ApiError(401, "no cookie of this console, or an old one", "open its link again")


def _of_aiohttp(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    if error.status < 400:
        return web.Response(status=error.status, headers=error.headers)
    message = f"{request.method} {request.path[:200]}: {error.reason}"
    return ApiError(error.status, message, "the API is described in docs/console.md").response()


class Login:
    """Lets requests in that have the secret: in the link, the cookie, or as a bearer token."""

    def __init__(self, config: ConsoleConfig) -> None:
        given = config.access_token
        self._token = given.get_secret_value() if given else secrets.token_urlsafe(32)
        self._cookie = f"seamflow_console_{self._derived('name')[:12]}"
        self._value = self._derived("session")

    @property
    def path(self) -> str:
        return f"/?token={self._token}"

    def knows(self, request: web.Request) -> bool:
        cookie = request.cookies.get(self._cookie, "")
        return _same(cookie, self._value) or _same(_bearer(request.headers), self._token)

    def enter(self, request: web.Request) -> web.Response:
        """Answer the link: a cookie, and a page that forwards to the console.

        It is no redirect: a browser that came from another site would send no strict cookie.
        """
        if not _same(request.query.get("token", ""), self._token):
            return _refusal("The token of this link is not that of the console that runs now.")
        page = web.Response(text=_WELCOME, content_type="text/html")
        page.set_cookie(
            self._cookie,
            self._value,
            max_age=_COOKIE_SECONDS,
            httponly=True,
            samesite="Strict",
            secure=request.secure,
            path="/",
        )
        return page

    def _derived(self, purpose: str) -> str:
        return hmac.new(self._token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def _refusal(reason: str) -> web.Response:
    """The page for a browser with another secret, which says how to get it."""
    page = _NO_WAY_IN.format(reason=reason)
    return web.Response(status=401, text=page, content_type="text/html")


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())
