"""Negative control: an agent runner whose turns are not resumed when a connection breaks."""

from __future__ import annotations

from seamflow.client import turn
from seamflow.errors import SeamflowError
from seamflow.retry import Backoff
from seamflow.runner.command_line import main


async def at_once(error: SeamflowError, backoff: Backoff) -> None:
    """Raise what the SDK would wait for."""
    raise error


if __name__ == "__main__":
    turn._wait_or_raise = at_once
    main()
