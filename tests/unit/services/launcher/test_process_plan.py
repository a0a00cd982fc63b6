"""A mode is nothing but tags."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from seamflow.trajectory.v1 import trajectory_pb2

from rollout.gateway.config import GatewayConfig
from rollout.http_gateway.config import HttpGatewayConfig
from services.chassis.config.load import load
from services.chassis.errors import ConfigError, ExitCode
from services.evaluator.config import EvaluatorConfig
from services.launcher.checks.prerequisites import check_installed, check_program
from services.launcher.checks.run_settings import check_settings
from services.launcher.config import LauncherConfig
from services.launcher.layout import agent_variables
from services.launcher.process_plan import plan
from services.launcher.run_rules import rules
from services.lib.evaluation import EvaluationConfig
from services.ranker.config import RankerConfig
from tests.lib.launcher.support import make_config, make_layout

SKEW_AWARE = Path(__file__).parents[4] / "examples/papers/skew_aware.toml"


MODES = {
    "colocated": ("node-a: rollout train",),
    "disaggregated": ("node-a: rollout", "node-b: train"),
    "multiplexed": ("node-a: rollout", "node-b: rollout train"),
}


@pytest.mark.parametrize("nodes", MODES.values(), ids=MODES)
def test_each_tag_has_its_process(nodes: tuple[str, ...], tmp_path: Path) -> None:
    """A rollout server for each node that can roll out, one trainer, an agent for each node."""
    config = make_config(nodes=nodes)
    names = list(plan(config, make_layout(config, tmp_path)))
    num_rollout = sum("rollout" in node for node in nodes)
    assert sum(name.startswith("rollout_server") for name in names) == num_rollout
    assert sum(name.startswith("node_agent") for name in names) == len(nodes)
    assert names.count("trainer") == 1


def test_rollout_servers_of_a_zone_relay_weights_at_their_addresses(tmp_path: Path) -> None:
    """Of the other nodes the weights service sends to each."""
    config = make_config(nodes=("a: rollout", "b: rollout; servers 2; zone west", "t: train"))
    layout = make_layout(config, tmp_path)
    prefix = "SEAMFLOW_ROLLOUT_SERVER_"
    found = {
        name: (each.environment[f"{prefix}ZONE"], each.environment[f"{prefix}WEIGHT_RELAY_ADDRESS"])
        for name, each in plan(config, layout).items()
        if f"{prefix}ZONE" in each.environment
    }
    assert found == {
        f"rollout_server-b.{index}": ("west", layout.address(f"rollout_server/b.{index}"))
        for index in range(2)
    }


def test_a_kind_of_devices_is_told_to_the_node_agent(tmp_path: Path) -> None:
    """Of the others nvidia-smi tells it."""
    config = make_config(nodes=("a: rollout; gpus 0; kind h20-96", "t: train; gpus 1"))
    assert config.node_plans()[0].text("rollout") == "a: rollout; gpus 0; kind h20-96"
    plans = plan(config, make_layout(config, tmp_path))
    variable = "SEAMFLOW_NODE_AGENT_KIND"
    assert plans["node_agent-a"].environment[variable] == "h20-96"
    assert variable not in plans["node_agent-t"].environment


def test_no_process_is_told_the_folder_of_weights(tmp_path: Path) -> None:
    """Trainer and servers of one machine find out by themselves that nothing has to be sent."""
    config = make_config(nodes=MODES["disaggregated"])
    processes = plan(config, make_layout(config, tmp_path))
    written = processes["weights"].environment["SEAMFLOW_WEIGHTS_FOLDER"]
    told = {name for name, each in processes.items() if written in each.environment.values()}
    assert told == {"weights"}


def test_nodes_that_score_have_a_scoring_service_each(tmp_path: Path) -> None:
    """Under their node agent; it requests its node, and there is none beside the nodes."""
    nodes = ("a: rollout", "b: rollout train score", "c: score")
    config = make_config(nodes=nodes, reference="{run}/teacher")
    processes = plan(config, make_layout(config, tmp_path))
    assert {name for name in processes if name.startswith("scoring")} == {"scoring-b", "scoring-c"}
    for node_id in "bc":
        scoring = processes[f"scoring-{node_id}"].environment
        assert scoring["SEAMFLOW_SCORING_NODE_AGENT"] == "true"
        assert scoring["SEAMFLOW_SCORING_NODE_ID"] == node_id
        agent = processes[f"node_agent-{node_id}"].environment
        address = f"127.0.0.1:{scoring['SEAMFLOW_SCORING_PORT']}"
        worker = {"tag": "score", "address": address}
        assert json.loads(agent["SEAMFLOW_NODE_AGENT_WORKERS"]) == [worker]
    assert "SEAMFLOW_NODE_AGENT_WORKERS" not in processes["node_agent-a"].environment


def test_a_node_computes_log_probs_and_rewards_in_turn(tmp_path: Path) -> None:
    """A tag, a service and a column for each of the two models; rewards may be beside the nodes."""
    nodes = ("a: rollout", "b: train score reward")
    models = {"reference": "{run}/teacher", "reward_model": "{run}/judge"}
    config = make_config(nodes=nodes, **models)
    processes = plan(config, make_layout(config, tmp_path))
    agent = json.loads(processes["node_agent-b"].environment["SEAMFLOW_NODE_AGENT_WORKERS"])
    of_tag = {worker["tag"]: worker["address"] for worker in agent}
    for tag, name in (("score", "scoring-b"), ("reward", "scoring-reward-b")):
        scoring = processes[name].environment
        assert of_tag[tag] == f"127.0.0.1:{scoring['SEAMFLOW_SCORING_PORT']}"
        assert scoring["SEAMFLOW_SCORING_NODE_TAG"] == tag
    assert config.columns == ("ref_logprobs", "reward_model")
    beside = make_config(reward_model="{run}/judge")
    scoring = plan(beside, make_layout(beside, tmp_path))["scoring-reward"].environment
    assert scoring["SEAMFLOW_SCORING_SCORER"] == "reward_model"
    assert "SEAMFLOW_SCORING_NODE_AGENT" not in scoring


@pytest.mark.parametrize(("tag", "setting"), [("score", "reference"), ("reward", "reward_model")])
def test_a_node_that_scores_needs_a_model(tag: str, setting: str) -> None:
    """The error names node, tag and setting."""
    with pytest.raises(ValueError, match=f"'b' with the tag '{tag}', and {setting} is not set"):
        make_config(nodes=("a: rollout train", f"b: {tag}"))


def test_the_gateway_asks_the_ranker_that_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example, loaded by each process's settings class with its environment."""
    arguments = ["--config", str(SKEW_AWARE)]
    config = load(LauncherConfig, "launcher", arguments)
    layout = make_layout(config, tmp_path)
    layout.config_file.touch()
    processes = plan(config, layout)
    for name in ("ranker", "rollout_gateway"):
        for variable, value in processes[name].environment.items():
            monkeypatch.setenv(variable, value)
    ranker = load(RankerConfig, "ranker", arguments)
    gateway = load(GatewayConfig, "rollout_gateway", arguments)
    assert gateway.lengths == "ranker"
    assert gateway.ranker == layout.addresses()["ranker"] == f"127.0.0.1:{ranker.port}"
    assert gateway.dispatch == "skew_aware"
    assert ranker.run_id == gateway.run_id == config.name
    assert processes["ranker"].optional


def test_there_is_no_ranker_by_default(tmp_path: Path) -> None:
    """Nor does the gateway look for one."""
    config = make_config()
    processes = plan(config, make_layout(config, tmp_path))
    assert "ranker" not in processes
    assert not any("LENGTHS" in name for name in processes["rollout_gateway"].environment)


def test_a_ranker_without_its_library_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that installs it."""
    config = make_config(ranker=True)
    plans = plan(config, make_layout(config, tmp_path)).values()
    check_installed(plans, None)
    there = "seamflow.installation._is_installed"
    monkeypatch.setattr(there, lambda name: name != "scikit-learn")
    with pytest.raises(ConfigError, match=r"^ranker needs .*pip install 'seamflow\[ranker\]'$"):
        check_installed(plans, None)


def test_replicated_needs_a_redis_with_a_replica() -> None:
    """The private Redis has none; the user's own may have one."""
    with pytest.raises(ValueError, match="give redis_url"):
        make_config(durability="replicated")
    config = make_config(durability="replicated", redis_url="redis://127.0.0.1:1")
    assert rules(config).durability == trajectory_pb2.DURABILITY_REPLICATED


def test_ports_differ(tmp_path: Path) -> None:
    """No two processes share an address."""
    ports = make_layout(make_config(), tmp_path).ports
    assert len(set(ports.values())) == len(ports)


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"nodes": ("node-a rollout",)}, "write 'name: tags'"),
        ({"nodes": ("node-a: rolout",)}, "write 'name: tags'"),
        ({"nodes": ("a: rollout", "b: train score")}, "'b' with the tag 'score', and reference"),
        ({"nodes": ("node-a: rollout",)}, "trainer_nodes is 1 and 0 of nodes"),
        ({"trainer_nodes": 2}, "trainer_nodes is 2 and 1 of nodes"),
        ({"group_size": 0}, "(?s)group_size.*greater than or equal to 1"),
        ({"name": "a/b"}, "use letters"),
        ({"agent_command": "python agent.py"}, "give agent for a class"),
        ({"environment": "games:Chess"}, "agent is 'a:B' and environment is 'games:Chess'"),
        ({"agent": None, "environment": "chess"}, "'host:port' or 'tool_loop'"),
        ({"environment_arguments": {"level": 3}}, "it belongs to an environment class"),
        (
            {"agent": None, "environment": "game:50070", "environment_python": "python3"},
            "it belongs to an environment class",
        ),
        ({"agent": None, "agent_command": " "}, "name a program"),
        (
            {"agent": None, "agent_command": "run 'it"},
            "quote it as in a shell",
        ),
        ({"tasks": None}, "tasks is not set: the agent runner leases tasks"),
    ],
)
def test_configuration_errors_name_the_cure(changes: dict[str, object], cure: str) -> None:
    """Each message names the cure."""
    with pytest.raises(ValueError, match=cure):
        make_config(**changes)


def test_an_agents_program_is_started_with_the_addresses(tmp_path: Path) -> None:
    """It gets the HTTP gateway, and no runner is started."""
    config = make_config(agent=None, agent_command="python my_agent.py --name 'a b'")
    layout = make_layout(config, tmp_path)
    processes = plan(config, layout)
    agent, gateway = processes["agent"], processes["http_gateway-0"]
    assert agent.command == ("python", "my_agent.py", "--name", "a b")
    port = gateway.environment["SEAMFLOW_HTTP_GATEWAY_HTTP_PORT"]
    assert agent.environment["SEAMFLOW_HTTP_GATEWAY"] == f"http://127.0.0.1:{port}"
    assert agent.environment["PATH"].startswith(str(Path(sys.executable).parent))
    assert "agent_runner" not in processes


def test_without_an_agent_the_launcher_waits_for_one_from_outside(tmp_path: Path) -> None:
    """The HTTP gateway is started, and no agent."""
    config = make_config(agent=None)
    processes = plan(config, make_layout(config, tmp_path))
    assert "http_gateway-0" in processes
    assert not processes.keys() & {"agent", "agent_runner"}
    assert config.are_agents_outside
    assert "http_gateway-0" not in plan(make_config(), make_layout(make_config(), tmp_path))


@pytest.mark.parametrize("agent", [{"agent": "a:B"}, {"agent": None, "agent_command": "run-it"}])
def test_serve_starts_no_agent_of_the_file(agent: dict[str, str | None], tmp_path: Path) -> None:
    """The same file trains and serves."""
    config = make_config(serve=True, **agent)
    processes = plan(config, make_layout(config, tmp_path))
    assert "http_gateway-0" in processes
    assert not processes.keys() & {"agent", "agent_runner"}


def test_an_environment_class_is_served_and_its_episodes_are_run(tmp_path: Path) -> None:
    """A server in the interpreter given, the episodes' process, and tasks of the environment."""
    config = make_config(
        agent=None,
        tasks=None,
        environment="games:Chess",
        environment_arguments={"level": 3},
        environment_python="/venv/bin/python",
        environment_servers=2,
    )
    layout = make_layout(config, tmp_path)
    processes = plan(config, layout)
    server, address = processes["environment_server-1"], layout.address("environment_server/1")
    assert server.command[:2] == ("/venv/bin/python", "-m")
    assert {"games:Chess", '{"level": 3}', address.partition(":")[2]} <= set(server.command)
    told = processes["environments-1"].environment
    assert told["SEAMFLOW_ENVIRONMENTS_ENVIRONMENT"] == address
    url = f"http://{layout.address('http_gateway')}"
    assert told["SEAMFLOW_ENVIRONMENTS_HTTP_GATEWAY_URL"] == url
    tasks = processes["dataloader"].environment["SEAMFLOW_DATALOADER_TASKS"]
    assert tasks == f"environment://{layout.address('environment_server/0')}"
    assert not processes.keys() & {"agent", "agent_runner"}
    assert "http_gateway-0" in processes
    assert not config.are_agents_outside


def test_held_out_tasks_and_the_token_of_an_environment_reach_its_callers(tmp_path: Path) -> None:
    """Each as a setting of the process that needs it."""
    config = make_config(
        agent=None,
        tasks=None,
        environment="game-a:50070",
        environment_token="secret",
        num_heldout=9,
    )
    layout = make_layout(config, tmp_path)
    layout.config_file.touch()
    processes = plan(config, layout)
    told = processes["evaluator"].environment
    assert told["SEAMFLOW_EVALUATOR_TASKS"] == "environment://game-a:50070"
    assert told["SEAMFLOW_EVALUATOR_NUM_HELDOUT"] == "9"
    assert told["SEAMFLOW_EVALUATOR_ENVIRONMENT_TOKEN"] == "secret"
    told = processes["dataloader"].environment
    assert told["SEAMFLOW_DATALOADER_NUM_HELDOUT"] == "9"
    assert told["SEAMFLOW_DATALOADER_EVALUATOR"] == layout.address("evaluator")
    assert told["SEAMFLOW_DATALOADER_ENVIRONMENT_TOKEN"] == "secret"
    told = processes["environments-0"].environment
    assert told["SEAMFLOW_ENVIRONMENTS_ENVIRONMENT_TOKEN"] == "secret"


@pytest.mark.parametrize(
    "changes",
    [{}, {"agent": None, "environment": "a:1"}, {"agent": None, "tasks": None}],
    ids=["agent", "tasks of a file", "agents from outside"],
)
def test_only_an_environments_own_tasks_can_be_held_out(changes: dict[str, str | None]) -> None:
    """The message names all that decides."""
    with pytest.raises(ValueError, match=r"num_heldout is 9, environment is .* and tasks is"):
        make_config(num_heldout=9, **changes)


def test_environment_servers_elsewhere_get_a_process_of_episodes_each(tmp_path: Path) -> None:
    """Nothing but the episodes is started for an address."""
    config = make_config(agent=None, environment="game-a:50070, game-b:50070")
    processes = plan(config, make_layout(config, tmp_path))
    told = [
        processes[f"environments-{i}"].environment["SEAMFLOW_ENVIRONMENTS_ENVIRONMENT"]
        for i in range(2)
    ]
    assert told == ["game-a:50070", "game-b:50070"]
    assert processes["dataloader"].environment["SEAMFLOW_DATALOADER_TASKS"] == "t.jsonl"
    assert not any(name.startswith("environment_server") for name in processes)


def test_the_tool_loop_is_an_environment_without_http(tmp_path: Path) -> None:
    """It reads its own table, and the episodes' process calls the model."""
    config = make_config(agent=None, environment="tool_loop")
    layout = make_layout(config, tmp_path)
    processes = plan(config, layout)
    told = processes["environments-0"].environment
    assert told["SEAMFLOW_ENVIRONMENTS_ENVIRONMENT"] == layout.address("environment_server/0")
    assert processes["tool_loop-0"].command[1:3] == ("-m", "services.tool_loop")
    assert "http_gateway-0" not in processes


def test_serve_runs_no_environment(tmp_path: Path) -> None:
    """Agents from outside take the tasks."""
    config = make_config(agent=None, environment="games:Chess", serve=True)
    processes = plan(config, make_layout(config, tmp_path))
    assert not any(name.startswith("environment") for name in processes)


def test_agents_may_bring_their_own_tasks(tmp_path: Path) -> None:
    """No tasks, no dataloader."""
    config = make_config(agent=None, tasks=None)
    assert "dataloader" not in plan(config, make_layout(config, tmp_path))


def test_the_http_gateway_takes_its_settings_from_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings class accepts what the launcher gives it, beside an agent's own variables."""
    config = make_config(agent=None)
    layout = make_layout(config, tmp_path)
    planned = plan(config, layout)["http_gateway-0"].environment
    given = {**planned, **agent_variables(config, layout)}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    gateway = load(HttpGatewayConfig, "http_gateway", [])
    assert (gateway.run_id, gateway.http_port) == ("run", layout.ports["http_gateway"])
    assert gateway.rollout_gateway == layout.address("rollout_gateway")


def test_an_unknown_agents_program_is_a_configuration_error(tmp_path: Path) -> None:
    """Before anything is started; a known one passes."""
    known = make_config(agent=None, agent_command="python agent.py")
    check_program(plan(known, make_layout(known, tmp_path)))
    unknown = make_config(agent=None, agent_command="no-such-program")
    with pytest.raises(ConfigError, match="'no-such-program', and there is no such program"):
        check_program(plan(unknown, make_layout(unknown, tmp_path)))


def test_the_evaluator_gets_the_table_evaluation(tmp_path: Path) -> None:
    """With what other tables complete; the settings class of the process reads it all back."""
    config = make_config(success="solved", concurrency=20)
    layout = make_layout(config, tmp_path)
    text = '[dataloader]\npayload = {q = "{question}"}\n[trainer.algorithm]\nreward = "solved"\n'
    layout.config_file.write_text(text)
    evaluation = EvaluationConfig(
        tasks="{run}/h.jsonl", every_steps=3, keep_best=False, goal="min", stop_target=0.5
    )
    process = plan(config, layout, evaluation)["evaluator"]
    told = check_settings([process])["evaluator"]
    assert isinstance(told, EvaluatorConfig)
    assert (told.tasks, told.metric) == (f"{tmp_path}/h.jsonl", "solved")
    assert (told.every_steps, told.keep_best, told.goal, told.stop_target) == (3, False, "min", 0.5)
    assert (told.payload, told.trained_rewards) == ({"q": "{question}"}, ("solved",))
    assert (told.concurrency_alone, told.silence_seconds, told.end_run) == (40, 120.0, False)
    assert ExitCode.UNAVAILABLE in process.fatal


def test_there_is_no_evaluator_without_held_out_tasks_or_while_serving(tmp_path: Path) -> None:
    """Nor does the dataloader wait for one."""
    for config in (make_config(), make_config(heldout_tasks="h.jsonl", serve=True)):
        processes = plan(config, make_layout(config, tmp_path))
        assert "evaluator" not in processes
        assert "SEAMFLOW_DATALOADER_EVALUATOR" not in processes["dataloader"].environment


def test_the_console_reads_and_its_death_ends_nothing(tmp_path: Path) -> None:
    """It knows the services that the run has; without the setting there is none."""
    config = make_config()
    layout = make_layout(config, tmp_path)
    console = plan(config, layout)["console"]
    assert console.optional and console.fatal == ()
    assert console.environment["SEAMFLOW_CONSOLE_SCHEDULER"] == layout.address("scheduler")
    assert console.environment["SEAMFLOW_CONSOLE_ACCESS_TOKEN"] == layout.console_token
    assert layout.console_token not in " ".join(console.command)
    assert "SEAMFLOW_CONSOLE_EVALUATOR" not in console.environment
    (tmp_path / "run.toml").touch()
    held_out = make_config(heldout_tasks="heldout.jsonl")
    with_evaluator = plan(held_out, make_layout(held_out, tmp_path))["console"]
    assert "SEAMFLOW_CONSOLE_EVALUATOR" in with_evaluator.environment
    assert "console" not in plan(make_config(console=False), layout)
