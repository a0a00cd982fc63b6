"""What has to be there before the first process of a run starts: packages, ports, groups, hosts."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from seamflow.installation import how_to_install, missing_packages

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from services.launcher.checks.run_settings import process_setting
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, is_free
from services.lib.evaluation import EvaluationConfig
from services.lib.group_baseline import check_group_size
from services.lib.model_files.end_ids import warn_of_end
from services.lib.model_files.json_file import check_attention
from services.lib.model_files.model_folder import (
    check_chat_template,
    check_classifier,
    check_model_folder,
    check_same_tokens,
)
from services.lib.tasks.sources import check_file

_ALL = "0.0.0.0"  # noqa: S104 -- compared, not bound

_ENGINES = {None: "rollout-server", "torch": "rollout-server", "sglang": "sglang"}
_ANY = "chassis"
_EMBEDDED = "torch"
_SHARED_PORTS = ("trainer.port", "trainer.admin_port", "http_gateway.http_port")
"""Of kinds of processes of which one listens at a time, or all share the port."""
_TRACKERS = frozenset({"tensorboard", "wandb", "mlflow"})
"""Each with the extra of its name."""
_MIN_FREE_BYTES = 512 * 1024 * 1024


def check_hosts(settings: Mapping[str, ServerConfig], addresses: Mapping[str, str]) -> None:
    """Refuse a process that would listen elsewhere alone, such as on ::1: nobody would reach it.

    Args:
        settings: of each process.
        addresses: at which the others reach it: 127.0.0.1, but for a run on several hosts.

    Raises:
        ConfigError: names the process, its host and the cure.
    """
    for name, each in settings.items():
        own = addresses[name]
        if each.host not in (own, _ALL) and own not in _addresses(each.host):
            raise ConfigError(
                f"host of {name} is {each.host!r}, and the processes of a run reach each other at "
                f"{own}: give {own}, or {_ALL} for callers of other machines too"
            )


def _addresses(host: str) -> set[str]:
    """What a name stands for; an address stands for itself."""
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET)
    except OSError:
        return set()
    return {str(address[0]) for *_, address in found}


def extra_of(table: str, engine: object) -> str:
    """The extra of a process, by the table of its settings; `engine` is that of rollout servers.

    What a plug-in engine needs is not known; it says so itself.
    """
    if table == "rollout_server":
        return _ENGINES.get(engine if isinstance(engine, str) else None, _ANY)
    return table.replace("_", "-")


def check_installed(plans: Iterable[ProcessPlan], engine: object) -> None:
    """Raise `ConfigError` with a line for each kind of process that lacks packages."""
    tables = dict.fromkeys(plan.table for plan in plans if plan.settings is not None)
    lacking = {
        table: (extra, missing)
        for table in tables
        if (missing := missing_packages(extra := extra_of(table, engine)))
    }
    if lacking:
        raise ConfigError(
            "\n".join(how_to_install(table, missing, e) for table, (e, missing) in lacking.items())
        )


def check_chosen(settings: Mapping[str, ServerConfig]) -> None:
    """Raise `ConfigError` with a line for each chosen option whose package is not installed."""
    chosen = dict(pair for name, each in settings.items() for pair in _chosen(name, each))
    lacking = {
        what: how_to_install(what, missing, extra)
        for what, extra in chosen.items()
        if (missing := missing_packages(extra))
    }
    if lacking:
        raise ConfigError("\n".join(lacking.values()))


def _chosen(name: str, settings: Any) -> Iterator[tuple[str, str]]:
    """What the settings of a process choose, as people write it, and the extra that it needs."""
    if settings.otlp_endpoint is not None:
        yield f"otlp_endpoint of {name}", "otel"
    if hasattr(settings, "tracking"):
        if rank := settings.lora.rank:
            yield f"trainer.lora.rank = {rank}", "lora"
        for tracker in _TRACKERS.intersection(settings.tracking.trackers):
            yield f"{tracker!r} in trainer.tracking.trackers", tracker
        if (store := settings.checkpoint.store or "").startswith("s3://"):
            yield f"trainer.checkpoint.store = {store!r}", "object-store"
    if str(tasks := getattr(settings, "tasks", "")).startswith("hf://"):
        yield f"tasks = {tasks!r}", "datasets"
    if getattr(settings, "kind", "") == "language_model":
        yield "ranker.kind = 'language_model'", "ranker-language-model"


def check_ports(settings: Mapping[str, ServerConfig]) -> None:
    """Refuse ports that two processes of this machine have, or that somebody listens on already.

    Raises:
        ConfigError: a line for each with process, setting, port and cure.
    """
    given: dict[tuple[str, int], str] = {}
    problems = []
    with ExitStack() as held:
        for name, each in settings.items():
            for setting in (field for field in type(each).model_fields if field.endswith("port")):
                port = getattr(each, setting)
                if isinstance(port, bool) or port <= 0:
                    continue
                own = f"{setting} of {name}"
                other = given.setdefault((each.host, port), own)
                if other == own:
                    if not is_free(each.host, port, held):
                        problems.append(f"{own} is {port}, and that port is taken")
                elif f"{name.partition('-')[0]}.{setting}" not in _SHARED_PORTS:
                    problems.append(f"{own} is {port}, and so is {other}")
    if problems:
        cure = "give another, or 0 for a free one"
        raise ConfigError("\n".join(f"{problem}: {cure}" for problem in problems))


def check_groups(config: LauncherConfig, config_file: Path) -> None:
    """Refuse groups of one for an algorithm that compares the rollouts of a group.

    Agents that bring tasks of their own, and a dataloader with max_samples, choose the sizes.

    Raises:
        ConfigError: names the setting, its value and the cure.
    """
    given = process_setting(config, config_file, "dataloader.group_size")
    is_chosen = process_setting(config, config_file, "dataloader.max_samples") not in (None, 0, "0")
    if is_chosen or (config.tasks is None and not config.runs_environment):
        return
    is_own = str(given).isdecimal() and str(given) != "0"
    setting = "dataloader.group_size" if is_own else "launcher.group_size"
    size = int(str(given)) if is_own else config.group_size
    name = process_setting(config, config_file, "trainer.algorithm.name") or "dapo"
    check_group_size(setting, size, str(name))


def check_prerequisites(config: LauncherConfig, layout: Layout) -> None:
    check_groups(config, layout.config_file)
    if process_setting(config, layout.config_file, "agent_runner"):
        raise ConfigError(
            "the file has a table [agent_runner], which no process reads: give agent, "
            "concurrency and rollout_timeout in [launcher], others by --set agent_runner.NAME=VALUE"
        )
    if config.prepare is None:
        _check_model(config, layout)
        path = config.tasks
        if path is not None and ":" not in path:
            check_file(Path(layout.path(path)))
    elif not (folder := Path(layout.path(config.model))).is_relative_to(layout.folder):
        with _as_config_error():  # `prepare` does not make it
            check_model_folder(folder)
    _check_space(config, layout)


def _check_space(config: LauncherConfig, layout: Layout) -> None:
    parent = layout.folder if layout.folder.exists() else layout.folder.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < _MIN_FREE_BYTES:
        raise ConfigError(
            f"runs_folder {config.runs_folder!r} has {free >> 20} MiB free: a run needs at least "
            f"{_MIN_FREE_BYTES >> 20} MiB; free some, or give --runs-folder on another disk"
        )


def _check_model(config: LauncherConfig, layout: Layout) -> None:
    folder = Path(layout.path(config.model))
    with _as_config_error():
        check_model_folder(folder)
        if not config.raw_tokens:
            check_chat_template(folder)
            if (warning := warn_of_end(folder)) is not None:
                print(f"launcher: warning: {warning}", file=sys.stderr)
        if engine_of(config, layout) in (None, _EMBEDDED):
            check_attention(folder)
        _check_other_models(config, layout, folder)


@contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_other_models(config: LauncherConfig, layout: Layout, policy: Path) -> None:
    """Check reference and critic, which get the policy's token ids; a reward model gets text."""
    critic = process_setting(config, layout.config_file, "trainer.critic_model")
    for name, given in (("reference", config.reference), ("trainer.critic_model", critic)):
        if given is not None:
            folder = Path(layout.path(str(given)))
            check_model_folder(folder)
            check_same_tokens(policy, folder, name)
    if config.reward_model is not None:
        check_classifier(Path(layout.path(config.reward_model)))


def engine_of(config: LauncherConfig, layout: Layout) -> object:
    """The engine that the file or --set gives; None: it is not given."""
    return process_setting(config, layout.config_file, "rollout_server.engine")


def check_evaluation(config: LauncherConfig, evaluation: EvaluationConfig) -> None:
    """Check that there is something to evaluate on, as it should be."""
    has_tasks = evaluation.tasks or config.heldout_tasks or config.num_heldout
    if evaluation.every_steps and not has_tasks:
        raise ConfigError(
            f"evaluation.every_steps is {evaluation.every_steps}, but there are no held-out tasks: "
            "give tasks in [evaluation], or num_heldout in [launcher] for an environment's own"
        )
    tasks = evaluation.tasks or config.heldout_tasks or ""
    if tasks.startswith("environment://"):
        raise ConfigError(
            f"held-out tasks are {tasks!r}: give num_heldout in [launcher] for those of the "
            "environment"
        )


def check_program(plans: Mapping[str, ProcessPlan]) -> None:
    """Raise `ConfigError` if the agent's program is not there."""
    agent = plans.get("agent")
    if agent is not None and shutil.which(agent.command[0], path=agent.environment["PATH"]) is None:
        raise ConfigError(
            f"agent_command starts {agent.command[0]!r}, and there is no such program: give its "
            "path, or install it"
        )
