"""An HTTP gateway that takes a repeated call for a new one: a negative control."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from aiohttp import web

from rollout.http_gateway import cli, turn_routes
from rollout.http_gateway.turn_ids import TurnIds

if TYPE_CHECKING:
    from seamflow.client.rollout_client import Rollout


class NewTurnIds(TurnIds):
    """Names each call's turn anew."""

    async def of(self, request: web.Request, body: bytes, rollout: Rollout) -> str:
        """A new name."""
        return uuid.uuid4().hex


if __name__ == "__main__":
    turn_routes.TurnIds = NewTurnIds  # type: ignore[attr-defined]  # what `TurnRoutes` makes
    cli.main()
