"""User and password of a Redis URL that may be rotated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from redis.credentials import CredentialProvider

from services.chassis.errors import ConfigError
from services.chassis.redis.url import parse_redis_url


class UrlCredentials(CredentialProvider):
    """Asked by redis-py at each connect, so that a new password counts from the next one on."""

    def __init__(self, url: Callable[[], str]) -> None:
        """`url` gives the current URL; user and password alone are taken from it.

        Raises:
            ConfigError: there is no such form of URL.
        """
        self._url = url
        self._last = _login(url())

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """User and password, or the password alone; the last ones if the URL is not valid now."""
        with suppress(ConfigError):
            self._last = _login(self._url())
        return self._last

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """As `get_credentials`: nothing is waited for."""
        return self.get_credentials()


def _login(url: str) -> tuple[str] | tuple[str, str]:
    options = parse_redis_url(url).options
    password = options.get("password", "")
    return (options["username"], password) if options.get("username") else (password,)
