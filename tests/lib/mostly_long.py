"""Parameters of a test of which `make test` takes a few, and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]


def mostly_long(values: Iterable[Any], *kept: Any, short: str) -> Sequence[Any]:
    """`values` for `pytest.mark.parametrize`, all but `kept` of them `long`.

    Args:
        values: of the parameter.
        kept: those that `make test` takes.
        short: `__file__` of the test, whose short form is the same with these.
    """
    file = str(Path(short).relative_to(_ROOT))
    long = pytest.mark.long(short=file)
    found = [each if each in kept else pytest.param(each, marks=long) for each in values]
    assert all(each in found for each in kept), f"{file}: not a value: one of {kept}"
    return found
