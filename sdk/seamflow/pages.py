"""Reads lists that services answer page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar


class _Page(Protocol):
    @property
    def next_page_token(self) -> str: ...


Request = TypeVar("Request", bound=Any)
Page = TypeVar("Page", bound=_Page)


async def pages(
    call: Callable[[Request], Awaitable[Page]], request: Request
) -> AsyncIterator[Page]:
    """All pages of the list that `call(request)` begins; changes the request's `page_token`."""
    while True:
        page = await call(request)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token
