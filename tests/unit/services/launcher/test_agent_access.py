"""Agents in processes of their own are told where the run is."""

from __future__ import annotations

from pathlib import Path

from services.launcher.layout import agent_variables, instructions
from tests.lib.launcher.support import make_config, make_layout


def test_an_agents_program_gets_both_addresses_the_run_and_the_token(tmp_path: Path) -> None:
    """The agents' token where there is one, else the services', else none."""
    config = make_config(agent=None, token="all", agent_token="agents")
    layout = make_layout(config, tmp_path)
    assert agent_variables(config, layout) == {
        "SEAMFLOW_HTTP_GATEWAY": f"http://{layout.address('http_gateway')}",
        "SEAMFLOW_GATEWAY": layout.address("rollout_gateway"),
        "SEAMFLOW_RUN_ID": "run",
        "SEAMFLOW_RUN": "run",
        "SEAMFLOW_AGENT_TOKEN": "agents",
    }
    one = make_config(agent=None, token="all")
    assert agent_variables(one, layout)["SEAMFLOW_AGENT_TOKEN"] == "all"
    assert "SEAMFLOW_AGENT_TOKEN" not in agent_variables(make_config(agent=None), layout)


def test_the_instructions_have_the_address_and_no_token(tmp_path: Path) -> None:
    """What is printed can be copied, and may be seen by others."""
    config = make_config(agent=None, agent_token="secret-of-agents")
    layout = make_layout(config, tmp_path)
    text = instructions(config, layout)
    url = f"http://{layout.address('http_gateway')}"
    assert f"{url}/rollouts/lease" in text
    assert "base_url" in text
    assert "$SEAMFLOW_AGENT_TOKEN" in text
    assert "secret-of-agents" not in text
    open_run = instructions(make_config(agent=None), layout)
    assert "authorization" not in open_run
