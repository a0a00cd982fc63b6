"""Pages of lists that are sorted by a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from services.chassis.errors import invalid_argument

MAX_PAGE = 1000
"""Entries of the largest page, and of one whose size is not given."""

T = TypeVar("T")


def page_of(
    entries: Sequence[T], name: Callable[[T], str], page_size: int, page_token: str
) -> tuple[Sequence[T], str]:
    """The entries after the one called `page_token`, and the token of the next page.

    Raises:
        ServiceError: INVALID_ARGUMENT, a negative size.
    """
    if page_size < 0:
        raise invalid_argument("page_size", page_size, f"0 (default) to {MAX_PAGE}")
    size = min(page_size or MAX_PAGE, MAX_PAGE)
    left = [entry for entry in entries if name(entry) > page_token]
    page = left[:size]
    return page, name(page[-1]) if len(left) > size else ""
