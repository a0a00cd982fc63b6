"""The smallest example works as it is written."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.lib.sdk.support import Gateway, serving

EXAMPLE = Path(__file__).parents[3] / "examples" / "minimal_agent.py"


async def test_the_minimal_agent_makes_one_rollout_of_two_turns() -> None:
    """Run as its docstring says, in at most 30 lines."""
    gateway = Gateway()
    async with serving(gateway.added()) as address, asyncio.timeout(30):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(str(EXAMPLE), address, "my-run"),
            env=dict(os.environ),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert b"'hello', then 'hello'" in out
    assert (len(gateway.offsets), len(gateway.finished)) == (2, 1)
    assert len(EXAMPLE.read_text().splitlines()) <= 30
