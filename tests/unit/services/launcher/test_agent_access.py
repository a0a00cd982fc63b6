"""Agents in processes of their own are told where the run is, and people when none comes."""

from __future__ import annotations

from pathlib import Path

from seamflow.inspect.snapshot import ServerSnapshot, Snapshot
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

from services.launcher.layout import agent_variables, instructions
from services.launcher.phases.watch import LeaseHint
from tests.lib.launcher.support import make_config, make_layout

ADVICE = "start one"


def make_snapshot(*, running: int = 0, queued: int = 5, admissible: int = 2) -> Snapshot:
    """A run with a rollout server."""
    readiness = sample_pb.Readiness(
        num_running_rollouts=running, num_queued_tasks=queued, num_admissible_groups=admissible
    )
    info = server_pb.GetServerInfoResponse()
    server = ServerSnapshot(node_id="node-a", address="a:1", info=info)
    return Snapshot(readiness=readiness, nodes=(), servers=(server,))


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


def test_the_hint_comes_once_when_tasks_wait_and_nobody_leases() -> None:
    """After some seconds, and again only after work was done in between."""
    hint = LeaseHint(ADVICE, are_tasks_own=False, seconds=30.0)
    seen = [hint.look(make_snapshot(), float(now)) for now in (0, 29, 30, 31, 300)]
    assert seen == [None, None, f"no agent has leased a task yet: {ADVICE}", None, None]
    assert hint.look(make_snapshot(running=1), 301.0) is None
    seen = [hint.look(make_snapshot(), float(now)) for now in (302, 331, 332)]
    assert seen == [None, None, f"no agent has leased a task for 30 s: {ADVICE}"]


def test_there_is_no_hint_while_there_is_nothing_to_lease() -> None:
    """The queue is empty, the trainer has enough groups, or no rollout server answers."""
    unable = Snapshot(readiness=make_snapshot().readiness, nodes=(), trainer=None, servers=())
    for idle in (make_snapshot(queued=0), make_snapshot(admissible=0), unable):
        hint = LeaseHint(ADVICE, are_tasks_own=False, seconds=1.0)
        assert [hint.look(idle, float(now)) for now in range(5)] == [None] * 5


def test_agents_with_tasks_of_their_own_need_no_queue() -> None:
    """The hint then waits for rollouts alone."""
    hint = LeaseHint(ADVICE, are_tasks_own=True, seconds=1.0)
    seen = [hint.look(make_snapshot(queued=0), float(now)) for now in range(2)]
    assert seen == [None, f"no agent has leased a task yet: {ADVICE}"]
