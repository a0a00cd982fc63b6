"""The secret of the link, and the cookie that stands for it in a browser.

The cookie is derived from the secret: a console that is started again with the same one knows it.
Cookies are shared by all ports of a host, so its name is that of the secret too.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from aiohttp import web

from services.console.config import ConsoleConfig

_SECONDS = 30 * 86_400
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


class Login:
    """Lets requests in that have the secret: in the link, the cookie, or as a bearer token."""

    def __init__(self, config: ConsoleConfig) -> None:
        given = config.access_token
        self._token = given.get_secret_value() if given else secrets.token_urlsafe(32)
        self._cookie = f"seamflow_console_{self._derived('name')[:12]}"
        self._value = self._derived("session")

    @property
    def path(self) -> str:
        """The end of the link."""
        return f"/?token={self._token}"

    def knows(self, request: web.Request) -> bool:
        """Whether a request may be answered."""
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
            max_age=_SECONDS,
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
