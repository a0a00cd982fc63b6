"""The negative control of fencing: a node agent that continues without a lease."""

from __future__ import annotations

from functools import partial

from services.chassis.rpc.server import run
from services.node_agent.agent import NodeAgent
from services.node_agent.cli import build
from services.node_agent.config import NodeAgentConfig


class UnfencedAgent(NodeAgent):
    """Never treats its lease as expired."""

    def lease_expired(self) -> bool:
        """Never."""
        return False


if __name__ == "__main__":
    run("node_agent", NodeAgentConfig, partial(build, agent_class=UnfencedAgent))
