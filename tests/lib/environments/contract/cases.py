"""The environments that the suite is run against."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.lib.environments.contract.case import ROOT, Case, serving, started
from tests.lib.redis_server import free_port

_MCP_PYTHON = ROOT / ".venv-adapters" / "mcp_tools" / "bin" / "python"

PLAIN = Case(name="plain", environment="tests.lib.environments.contract.plain:Plain")
GYMNASIUM = Case(
    name="gymnasium",
    environment="adapters.gymnasium.environment:GymnasiumEnvironment",
    arguments={"env_id": "CartPole-v1"},
    venv="gymnasium",
    answers=("I push 1", "0"),
)
TEXTARENA = Case(
    name="textarena",
    environment="adapters.textarena.environment:TextArenaEnvironment",
    arguments={"env_id": "TicTacToe-v0", "num_players": 2},
    venv="textarena",
    answers=("[4]", "[0]", "[1]", "[2]", "[3]", "[5]"),
)
REASONING_GYM = Case(
    name="reasoning_gym",
    environment="adapters.reasoning_gym.environment:ReasoningGymEnvironment",
    arguments={"dataset": "chain_sum", "size": 8, "seed": 3},
    venv="reasoning_gym",
    answers=("I add. <answer>7</answer>",),
    is_random=False,
)


@contextmanager
def openenv_server(max_sessions: int = 16) -> Iterator[Mapping[str, Any]]:
    """A server of OpenEnv; yields the arguments that name it."""
    port = free_port()
    command = [str(OPENENV.python), "-m", "tests.lib.environments.contract.openenv_server"]
    with started([*command, "--port", str(port), "--max-sessions", str(max_sessions)]):
        yield {"url": f"http://127.0.0.1:{port}"}


OPENENV = Case(
    name="openenv",
    environment="adapters.openenv.environment:OpenEnvEnvironment",
    arguments={"action_field": "text", "observation_field": "text"},
    venv="openenv",
    backend=openenv_server,
)
MCP_TOOLS = Case(
    name="mcp_tools",
    environment="adapters.mcp_tools.environment:McpToolsEnvironment",
    venv="mcp_tools",
    arguments={
        "command": [str(_MCP_PYTHON), "-m", "tests.lib.environments.contract.mcp_server"],
        "env": {"PYTHONPATH": str(ROOT)},
        "reset_tool": "start",
        "reward_tool": "score",
        "is_seeded": True,
    },
)
_NODE_FOLDER = ROOT / "examples" / "clients" / "node"


def _without_node() -> str:
    if shutil.which("node") is None:
        return "node is not installed"
    is_made = (_NODE_FOLDER / "node_modules").exists()
    return "" if is_made else f"npm install --prefix {_NODE_FOLDER.relative_to(ROOT)}"


NODE = Case(
    name="node",
    command=("node", str(_NODE_FOLDER / "environment.js")),
    missing=_without_node,
)

CASES = (PLAIN, GYMNASIUM, TEXTARENA, REASONING_GYM, OPENENV, MCP_TOOLS, NODE)


@contextmanager
def serving_backend(case: Case) -> Iterator[Mapping[str, Any]]:
    """A server of `case`; yields the setting of the launcher that names it."""
    with serving(case) as (address, _):
        yield {"environment": address}
