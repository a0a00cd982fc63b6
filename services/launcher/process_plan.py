"""The processes of a run and their settings; pure, so that a dry run can show them.

An agent of the setting `agent` is run by the agent runner, over gRPC. Every other agent has a
program of its own, so the HTTP gateway is started for it, as for environments, which may call the
model by themselves.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from services.launcher.checks.run_settings import CHECK_TASKS
from services.launcher.child_process import (
    ProcessPlan,
    checking,
    process,
    service,
    settings_of,
    with_gpus,
)
from services.launcher.config import LauncherConfig, ScorerPlan, flags_by_table
from services.launcher.evaluation import evaluators
from services.launcher.layout import (
    LOOPBACK,
    Layout,
    agent_variables,
    base_url,
    environment_addresses,
    environment_server_names,
    scorer_names,
    server_name,
)
from services.launcher.node_plan import NodePlan
from services.launcher.report.mechanisms import ports_file
from services.launcher.trainer_plan import trainers
from services.lib.evaluation import EvaluationConfig

CHECK_FUNCTIONS = "services.tool_loop.check_functions"
_ON_LOOPBACK = ("console", "tool_loop")
"""Listen there in every run."""


def plan(
    config: LauncherConfig,
    layout: Layout,
    evaluation: EvaluationConfig | None = None,
    once_step: int | None = None,
) -> dict[str, ProcessPlan]:
    """All processes by name, in the order they are started.

    `evaluation` is the table of that name; `once_step`: the model is evaluated once, as that of
    this optimizer step.
    """
    tasks = config.tasks or environment_tasks(config, layout)
    evaluator = evaluators(config, evaluation or EvaluationConfig(), layout, once_step)
    processes = [
        service(
            "trajectory_manager",
            "trajectory_manager",
            layout,
            redis_url=layout.redis_url,
            durability=config.durability,
        ),
        service(
            "weights",
            "services.weights",
            layout,
            redis_url=layout.redis_url,
            folder=layout.folder / "weights",
        ),
        service("scheduler", "scheduler", layout, redis_url=layout.redis_url),
        *([_console(config, layout, evaluator)] if config.console else []),
        *([_ranker(layout)] if config.ranker else []),
        *(each for scorer in config.scorers for each in _scoring(scorer, config, layout)),
        _gateway(config, layout),
        *_http_gateways(config, layout),
        *[
            _rollout_server(node, index, config, layout)
            for node in config.node_plans()
            for index in range(len(node.server_ids()))
        ],
        *trainers(config, layout, evaluation or EvaluationConfig()),
        *[_node_agent(node, config, layout) for node in config.node_plans()],
        *_agent(config, layout),
        *environment_processes(config, layout),
        *evaluator,
        *([_dataloader(tasks, config, layout, evaluator)] if tasks is not None else []),
    ]
    flags = flags_by_table(config.set)
    return {
        each.name: _with_flags(
            _with_ports_file(_with_address(each, layout), layout), flags.get(each.table, ())
        )
        for each in processes
    }


def _with_address(process: ProcessPlan, layout: Layout) -> ProcessPlan:
    port = process.environment.get(f"SEAMFLOW_{process.table.upper()}_PORT", "0")
    if port == "0":
        return process
    host = LOOPBACK if process.table in _ON_LOOPBACK else layout.hosts[process.host]
    return replace(process, address=f"{host}:{port}")


def _with_ports_file(process: ProcessPlan, layout: Layout) -> ProcessPlan:
    """On this host, where the run's folder is."""
    if process.host:
        return process
    file = str(ports_file(layout.folder / "logs", process.name))
    return replace(process, environment={**process.environment, "SEAMFLOW_PORT_FILE": file})


def _with_flags(process: ProcessPlan, flags: tuple[str, ...]) -> ProcessPlan:
    settings, check = process.settings, process.check
    return replace(
        process,
        command=(*process.command, *flags),
        settings=None if settings is None else (*settings, *flags),
        check=check if check is None or settings is None else (*check, *flags),
    )


def _console(
    config: LauncherConfig, layout: Layout, evaluator: Sequence[ProcessPlan]
) -> ProcessPlan:
    """The run does not depend on it."""
    names = ["trajectory_manager", "rollout_gateway", "scheduler", "trainer", "weights"]
    names += ["evaluator"] if evaluator else []
    environment = settings_of(
        "console",
        port=layout.own_port("console"),
        http_port=layout.ports["console"],
        access_token=layout.console_token,
        run_id=layout.run_id,
        run_folder=layout.folder,
        model=layout.path(config.model),
        **{name: layout.address(name) for name in names},
    )
    console = process("console", "services.console", layout, environment)
    return replace(console, optional=True, fatal=())


def _ranker(layout: Layout) -> ProcessPlan:
    ranker = service(
        "ranker",
        "services.ranker",
        layout,
        run_id=layout.run_id,
        trajectory_manager=layout.address("trajectory_manager"),
    )
    return replace(ranker, optional=True)


def _scoring(scorer: ScorerPlan, config: LauncherConfig, layout: Layout) -> Iterator[ProcessPlan]:
    """The services of a frozen model: one on each node of its tag, or one beside the nodes."""
    nodes = [node for node in config.node_plans() if scorer.tag in node.tags]
    for name, node in zip_longest(scorer_names(scorer, config), nodes):
        settings = {} if node is None else _on_node(node, scorer.tag, layout)
        environment = settings_of(
            "scoring",
            port=layout.ports[name],
            run_id=layout.run_id,
            column=scorer.column,
            scorer=scorer.scorer,
            model=layout.path(scorer.model),
            policy_model=layout.path(config.model),
            trajectory_manager=layout.address("trajectory_manager"),
            **settings,
        )
        scoring = process(name.replace("/", "-"), "services.scoring", layout, environment)
        placed = replace(scoring, host=node.host if node else 0)
        yield with_gpus(placed, node.gpus if node else (), config.node_plans())


def _on_node(node: NodePlan, tag: str, layout: Layout) -> dict[str, object]:
    return {
        "instance": node.node_id,
        "node_agent": "true",
        "node_id": node.node_id,
        "node_tag": tag,
        "scheduler": layout.address("scheduler"),
        **({"device": "cuda"} if node.gpus else {}),
    }


def _gateway(config: LauncherConfig, layout: Layout) -> ProcessPlan:
    lengths = {"lengths": "ranker", "ranker": layout.address("ranker")} if config.ranker else {}
    return service(
        "rollout_gateway",
        "rollout.gateway",
        layout,
        run_id=layout.run_id,
        model=layout.path(config.model),
        trajectory_manager=layout.address("trajectory_manager"),
        scheduler=layout.address("scheduler"),
        weights=layout.address("weights"),
        # Given here so that a restarted gateway derives the same credentials.
        credential_secret=layout.credential_secret,
        **lengths,
    )


def _http_gateways(config: LauncherConfig, layout: Layout) -> list[ProcessPlan]:
    number = config.http_gateways if config.has_http_gateway else 0
    return [_http_gateway(f"http_gateway-{index}", layout) for index in range(number)]


def _http_gateway(name: str, layout: Layout) -> ProcessPlan:
    environment = settings_of(
        "http_gateway",
        instance=name,
        port=layout.own_port(name),
        share_port=True,
        http_port=layout.ports["http_gateway"],
        run_id=layout.run_id,
        rollout_gateway=layout.address("rollout_gateway"),
    )
    return process(name, "rollout.http_gateway", layout, environment)


def _rollout_server(
    node: NodePlan, index: int, config: LauncherConfig, layout: Layout
) -> ProcessPlan:
    server_id, gpus = node.server_ids()[index], node.server_gpus(index)
    name = server_name(server_id)
    environment = settings_of(
        "rollout_server",
        instance=server_id,
        server_id=server_id,
        port=layout.ports[name],
        run_id=layout.run_id,
        model=layout.path(config.model),
        weights=layout.address("weights"),
        cache_folder=layout.folder / "cache" / server_id,
        lends_device=str(node.lends).lower(),
        num_gpus=len(gpus),
        **({"zone": node.zone, "weight_relay_address": layout.address(name)} if node.zone else {}),
    )
    server = process(name.replace("/", "-"), "rollout.server", layout, environment)
    return with_gpus(replace(server, host=node.host), gpus, config.node_plans())


def _node_agent(node: NodePlan, config: LauncherConfig, layout: Layout) -> ProcessPlan:
    workers = {}
    servers = [("rollout", layout.address(server_name(each))) for each in node.server_ids()]
    if servers:
        workers["rollout_server"] = servers.pop(0)[1]
    if "train" in node.tags:
        workers["trainer"] = layout.address("trainer")
    scorers = [scorer for scorer in config.scorers if scorer.tag in node.tags]
    others = servers + [
        (each.tag, layout.address(each.service_on(node.node_id))) for each in scorers
    ]
    if others:
        workers["workers"] = json.dumps(
            [{"tag": tag, "address": address} for tag, address in others]
        )
    if node.gpus:
        workers["gpus"] = ",".join(map(str, node.gpus))
    if node.kind:
        workers["kind"] = node.kind
    environment = settings_of(
        "node_agent",
        instance=node.node_id,
        port=layout.own_port(f"node_agent-{node.node_id}"),
        node_id=node.node_id,
        run_id=layout.run_id,
        scheduler=layout.address("scheduler"),
        capability_tags=",".join(node.tags),
        **workers,
    )
    agent = process(f"node_agent-{node.node_id}", "services.node_agent", layout, environment)
    return replace(agent, host=node.host)


def _agent(config: LauncherConfig, layout: Layout) -> list[ProcessPlan]:
    """The process of the agent, if the launcher starts it."""
    if config.runner_agent is not None:
        return [_agent_runner(config.runner_agent, config, layout)]
    if not config.agent_arguments:
        return []
    # "python" is the interpreter that runs the launcher, activated or not.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    # A program of the user's imports from its own folder.
    own = {"PATH": path, "PYTHONSAFEPATH": ""}
    environment = {**agent_variables(config, layout), **own}
    return [ProcessPlan(name="agent", command=config.agent_arguments, environment=environment)]


def _agent_runner(agent: str, config: LauncherConfig, layout: Layout) -> ProcessPlan:
    environment = settings_of(
        "agent_runner",
        agent=agent,
        run_id=layout.run_id,
        gateway=layout.address("rollout_gateway"),
        concurrency=config.concurrency,
        rollout_timeout=config.rollout_timeout,
        **({"token_log": layout.folder / "received.jsonl"} if config.token_audit else {}),
    )
    loads = _loads("seamflow.runner.agent_runner", f"load_agent({agent!r})")
    return ProcessPlan(
        name="agent_runner",
        command=(sys.executable, "-m", "seamflow.runner"),
        environment=environment,
        check=(sys.executable, "-c", loads),
    )


def environment_processes(config: LauncherConfig, layout: Layout) -> list[ProcessPlan]:
    """The environment's servers, and for each the process that runs its episodes."""
    if not config.runs_environment:
        return []
    addresses = environment_addresses(config, layout)
    names = environment_server_names(config)
    servers = [_environment_server(name, config, layout) for name in names]
    return servers + [_episodes(i, each, config, layout) for i, each in enumerate(addresses)]


def environment_tasks(config: LauncherConfig, layout: Layout) -> str | None:
    if not config.runs_environment:
        return None
    return f"environment://{environment_addresses(config, layout)[0]}"


def _environment_server(name: str, config: LauncherConfig, layout: Layout) -> ProcessPlan:
    name, port = name.replace("/", "-"), layout.ports[name]
    if config.environment == "tool_loop":
        index = name.rpartition("-")[2]
        environment = settings_of("tool_loop", instance=name, port=port)
        loop = process(f"tool_loop-{index}", "services.tool_loop", layout, environment)
        return replace(loop, check=checking(CHECK_FUNCTIONS, layout))
    python = config.environment_python or sys.executable
    given: tuple[str, ...] = ("--environment", str(config.environment), "--port", str(port))
    if config.environment_arguments:
        given += ("--arguments", json.dumps(config.environment_arguments))
    call = f"load_object({config.environment!r}, 'environment')"
    loads = _loads("seamflow.environment.environment_class", call)
    return ProcessPlan(
        name=name,
        command=(python, "-m", "seamflow.environment", *given),
        check=(python, "-c", loads),
    )


def _episodes(index: int, address: str, config: LauncherConfig, layout: Layout) -> ProcessPlan:
    http = {"http_gateway_url": base_url(config, layout)} if config.has_http_gateway else {}
    environment = settings_of(
        "environments",
        instance=f"environments-{index}",
        port=layout.own_port(f"environments-{index}"),
        run_id=layout.run_id,
        rollout_gateway=layout.address("rollout_gateway"),
        environment=address,
        **_token(config),
        **http,
    )
    return process(f"environments-{index}", "services.environments", layout, environment)


def _token(config: LauncherConfig) -> dict[str, str]:
    token = config.environment_token
    return {} if token is None else {"environment_token": token.get_secret_value()}


def _dataloader(
    tasks: str, config: LauncherConfig, layout: Layout, evaluator: Sequence[ProcessPlan]
) -> ProcessPlan:
    environment = settings_of(
        "dataloader",
        port=layout.own_port("dataloader"),
        run_id=layout.run_id,
        trajectory_manager=layout.address("trajectory_manager"),
        tasks=layout.path(tasks),
        state_file=layout.folder / "dataloader.json",
        seed=config.seed,
        resume="true",
        **({"num_heldout": config.num_heldout} if config.num_heldout else {}),
        **({"evaluator": layout.address("evaluator")} if evaluator else {}),
        **_token(config),
    )
    dataloader = process("dataloader", "services.dataloader", layout, environment)
    is_prepared = config.prepare is not None and "{run}" in tasks  # not there yet
    check = None if is_prepared else checking(CHECK_TASKS, layout)
    return replace(dataloader, check=check)


def _loads(module: str, call: str) -> str:
    """Python that makes the call and ends with one line if that fails."""
    function = call.partition("(")[0]
    return (
        f"import sys\nfrom {module} import {function}\n"
        f"try:\n    {call}\nexcept ValueError as error:\n    sys.stderr.write(f'{{error}}\\n')\n"
        "    sys.exit(78)"
    )
