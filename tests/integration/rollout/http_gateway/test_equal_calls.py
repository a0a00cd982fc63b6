"""Equal calls are samples of their own, and a repeated call gets the turn that it had begun."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.http_gateway.turn_ids import TurnIds
from tests.lib.rollout.http_gateway.support import world
from tests.suites.agents.equal_calls import LIMIT, equal_calls, repeated_calls

NUM_CALLS = 3 * LIMIT
NUM_REPEATED = 6


class AnyTurn(TurnIds):
    """A control: a repeated call may take any turn of its content."""

    def _is_free(self, rollout_id: str, turn: Any, prefix: str, *, is_only: bool) -> bool:
        return True


class NoTurn(TurnIds):
    """A control: no repeated call takes a turn."""

    def _matching(self, rollout_id: str, turns: Sequence[Any], prefix: str) -> str | None:
        return None


@pytest.mark.parametrize("kind", [TurnIds, AnyTurn])
async def test_equal_calls_above_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[TurnIds]
) -> None:
    """Refused calls are repeated by the SDK, and get samples of their own."""
    monkeypatch.setattr("rollout.http_gateway.turn_routes.TurnIds", kind)
    async with world(tmp_path, max_calls_per_rollout=LIMIT) as gateway:
        found = await equal_calls(gateway, NUM_CALLS)
    assert (found["copies"] == 0) == (kind is TurnIds), found
    assert (found["different_samples"] == NUM_CALLS) == (kind is TurnIds), found
    assert found["not_received"] == 0


@pytest.mark.parametrize("kind", [TurnIds, NoTurn])
async def test_calls_that_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[TurnIds]
) -> None:
    """After a refusal, a broken connection and a late answer, though equal turns are recorded."""
    monkeypatch.setattr("rollout.http_gateway.turn_routes.TurnIds", kind)
    async with world(tmp_path, max_calls_per_rollout=1, hold_seconds=0.0) as gateway:
        found = await repeated_calls(gateway, NUM_REPEATED)
    assert (found["repeated_right"] == NUM_REPEATED) == (kind is TurnIds), found
