"""A small MCP server on stdin and stdout: guess a number with a tool.

.venv-adapters/mcp_tools/bin/python -m tests.lib.environments.contract.mcp_server
"""

from __future__ import annotations

import os
import random
from typing import Any

from mcp.server.mcpserver import MCPServer

server = MCPServer("guess")
state: dict[str, int] = {}


@server.tool()
def start(task: dict[str, Any], seed: int) -> dict[str, Any]:
    """Choose a number from 1 to 9."""
    state["number"] = random.Random(seed).randint(1, 9)
    return {"text": f"Guess a number from 1 to 9. It is not {state['number'] % 9 + 1}."}


@server.tool()
def guess(number: int) -> dict[str, Any]:
    """Guess it."""
    if number == -2:
        os._exit(1)
    if number == state["number"]:
        return {"text": "right", "reward": True, "done": True}
    return {"text": "higher" if number < state["number"] else "lower"}


@server.tool()
def score(task: dict[str, Any], answer: str) -> dict[str, Any]:
    """Whether the answer is the number."""
    return {"reward": answer.strip() == str(state["number"])}


server.run("stdio")
