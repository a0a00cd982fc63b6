"""Every kind of input, in a short form: its examples and a few generated inputs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import strategies

from tests.suites.field.areas import AREAS, kinds_of
from tests.suites.field.kind import Kind

NAMED = {kind.name: kind for area in AREAS for kind in kinds_of(area)}


@pytest.fixture
def without_logs() -> Iterator[None]:
    """Logs quote inputs, among them texts that no report can be sent with."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.usefixtures("without_logs")
def test_inputs_are_answered_right(name: str) -> None:
    kind = NAMED[name]
    assert not kind.try_inputs(kind.short).failures


def _below_seven(value: int) -> None:
    if value >= 7:
        raise AssertionError("seven or more")


async def _never(value: int) -> None:
    raise ValueError(value)


def test_wrong_answers_are_counted() -> None:
    kind = Kind(name="small", check=_below_seven, examples=[1, 9], generated=strategies.integers())
    tried = kind.try_inputs(100)
    assert tried.inputs > 2
    assert tried.failures == [
        "9: AssertionError: seven or more",
        "7: AssertionError: seven or more",
    ]


def test_checks_may_be_coroutines() -> None:
    assert Kind(name="never", check=_never, examples=[1]).try_inputs(0).failures == [
        "1: ValueError: 1"
    ]
