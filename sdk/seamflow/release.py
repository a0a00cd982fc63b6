"""Release of this package, and which other releases it works with."""

from __future__ import annotations

import re

__all__ = ["HEADER", "RELEASE", "__version__", "works_with"]

__version__ = "0.3.0.dev0"

RELEASE = ".".join(__version__.split(".")[:2])
"""<major>.<minor>: within one, the contract is the same."""

HEADER = "seamflow-release"
"""Metadata of every call from this package: its RELEASE. Other clients need not send it."""

_FORM = re.compile(r"(\d{1,6})\.(\d{1,6})")


def works_with(other: str, own: str = RELEASE) -> bool:
    """Whether two releases work together: of one major version, at most one minor version apart."""
    given, ours = _FORM.fullmatch(other), _FORM.fullmatch(own)
    if given is None or ours is None or given[1] != ours[1]:
        return False
    return abs(int(given[2]) - int(ours[2])) <= 1
