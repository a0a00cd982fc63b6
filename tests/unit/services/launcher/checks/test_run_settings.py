"""Deltas of weights in float32 are named before a run starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.launcher.checks.run_settings import deltas_that_cannot_pay


def settings(dtype: str, encodings: tuple[str, ...], rank: int = 0) -> Any:
    """What counts of a trainer's and a rollout server's."""
    return {
        "trainer": SimpleNamespace(dtype=dtype, lora=SimpleNamespace(rank=rank)),
        "rollout_server/0": SimpleNamespace(weight_encodings=encodings),
        "weights": SimpleNamespace(),
    }


def test_deltas_of_float32_are_named_with_the_cure() -> None:
    """Who asks, why it saves nothing, and what to set."""
    (line,) = deltas_that_cannot_pay(settings("float32", ("delta", "zstd")))
    for part in ("rollout_server/0", "float32", 'dtype = "bfloat16"', '["zstd"]'):
        assert part in line


@pytest.mark.parametrize(
    "given",
    [
        settings("bfloat16", ("delta",)),
        settings("float32", ("zstd",)),
        settings("float32", ("delta",), rank=8),
        {"rollout_server": SimpleNamespace(weight_encodings=("delta",))},
    ],
)
def test_nothing_is_said_where_deltas_may_pay_or_none_are_asked_for(given: Any) -> None:
    """Small types, no deltas, adapters, and a run without a trainer."""
    assert deltas_that_cannot_pay(given) == []
