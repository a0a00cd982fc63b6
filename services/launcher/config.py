"""Launcher settings, table [launcher].

The same file holds the tables of all other processes; each reads its own. Addresses, folders and
the run's name are passed to the child processes by environment.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from services.chassis.config.load import TABLES
from services.chassis.config.sources import nearest
from services.launcher.node_plan import (
    NodePlan,
    check_gpus,
    check_hosts_of_nodes,
    node_plan,
    ranks_of,
)
from services.launcher.run_rules import RunRules

REFERENCE_COLUMN = "ref_logprobs"
REWARD_COLUMN = "reward_model"

DEFAULT_FILE = "train.toml"
"""Read from the current folder where no configuration file is named."""
_PACKED, _SPECIAL = "packed:", ',"\\'


def flags_by_table(given: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Command-line flags of each table: "trainer.optimizer.learning_rate=1e-5" becomes
    {"trainer": ("--optimizer.learning-rate=1e-5",)}.

    Raises:
        ValueError: it names no setting of a process; the message names the cure.
    """
    flags = defaultdict[str, tuple[str, ...]](tuple)
    for text in given:
        path, equals, value = text.partition("=")
        table, _, name = path.strip().partition(".")
        if not equals or not name:
            raise ValueError(f"set is {text!r}: write it as TABLE.SETTING=VALUE")
        flag = "--" + name.replace("_", "-")
        if table not in TABLES:
            raise ValueError(
                f"set is {text!r}: there is no table {table!r}{nearest(table, TABLES)}"
            )
        flags[table] += (f"{flag}={value}",)
    return dict(flags)


def own_settings(arguments: Sequence[str]) -> list[str]:
    """The command line with `--set launcher.NAME=VALUE` as the flag that it stands for, --NAME."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--set", action="append", default=[])
    try:
        given, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError:  # `load` says what is missing
        return list(arguments)
    own = [text for text in given.set if text.strip().startswith("launcher.")]
    others = [_packed(text) for text in given.set if text not in own]
    return [*rest, *others, *flags_by_table(own).get("launcher", ())]


def _packed(text: str) -> str:
    """As the flag of one text: pydantic-settings would cut it at commas and undo its quotes."""
    return f"--set={_PACKED}{text.encode().hex()}" if set(text) & set(_SPECIAL) else f"--set={text}"


def unpacked(text: object) -> object:
    """A text of --set as it was given."""
    if isinstance(text, str) and text.startswith(_PACKED):
        return bytes.fromhex(text.removeprefix(_PACKED)).decode()
    return text


def with_file(arguments: Sequence[str]) -> list[str]:
    """The command line with --config of `DEFAULT_FILE`, if it names no file and that one exists."""
    given = any(each == "--config" or each.startswith("--config=") for each in arguments)
    default = [] if given or not Path(DEFAULT_FILE).is_file() else ["--config", DEFAULT_FILE]
    return [*default, *arguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerPlan:
    """A frozen model that computes a column of the samples."""

    tag: str
    """Of the nodes that compute it; if there is none, it is computed beside the nodes."""
    model: str
    column: str
    scorer: str
    service: str

    def service_on(self, node_id: str) -> str:
        """Name of its service on a node."""
        return f"{self.service}/{node_id}"


class LauncherConfig(RunRules):
    """One run, on this machine and those of `hosts`, with its rules. "{run}" in a path is the run's
    own folder."""

    name: str
    """Name of the run and its folder; an existing one needs --resume."""
    model: str
    """Hugging Face folder to start from."""
    raw_tokens: bool = False
    """Agents send token ids and no messages, so that the model needs no chat template."""
    tasks: str | None = None
    """Tasks to train on: a JSONL or Parquet file, "hf://DATASET", or "package.module:function";
    unset: those of the environment, or agents start rollouts of their own groups."""
    agent: str | None = None
    """The agent, as "package.module:Class", run by the agent runner. Unset, and neither
    agent_command nor environment: agents connect from outside."""
    agent_command: str | None = None
    """Command line of the agent's own program, such as "python agent.py", started with the run's
    addresses in its environment."""
    environment: str | None = None
    """The environment whose episodes are run instead of an agent: "package.module:Class", the
    address "host:port" of an environment server, several separated by commas, or "tool_loop" for
    the one that the table [tool_loop] describes. Without `tasks` it gives its own."""
    environment_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment class."""
    environment_python: str | None = None
    """Python interpreter of the environment class, such as that of a virtual environment; unset:
    the launcher's own."""
    environment_servers: int = Field(1, ge=1)
    """Processes of the environment class, or of the tool loop."""
    environment_token: SecretStr | None = None
    """Bearer token of the environment server at an address."""
    num_heldout: int = Field(0, ge=0)
    """Last tasks of the environment's own list that are never trained on; they are evaluated,
    unless heldout_tasks, or tasks of [evaluation], names others."""
    http_port: int = Field(0, ge=0, le=65535)
    """Port of the HTTP gateway, which is started where `agent` is unset; 0: a free one, which
    --resume keeps."""
    http_gateways: int = Field(2, ge=1)
    """HTTP gateways that share the port: with two, no call notices that one is killed or
    replaced, but for a retry of its SDK."""
    heldout_tasks: str | None = None
    """Held-out tasks, in each form that `tasks` has, evaluated before and after training."""
    success: str = ""
    """Name of the reward (0 or 1) that measures success. Empty: "success", or where rollouts do not
    have it "reward", or the only one that they have."""
    prepare: str | None = None
    """Module that makes model and tasks: `python -m <prepare> --out {run}/prepared --seed N`."""
    nodes: tuple[str, ...] = ("node-a: rollout", "node-b: rollout train")
    """Nodes and their capability tags, which decide who rolls out, who trains, and who computes the
    reference's log-probs (score) and the reward model's rewards (reward). Without a node of such a
    tag they are computed beside the nodes. On a machine with GPUs each node is given its own, by
    the numbers of nvidia-smi: "a: rollout train; gpus 0-3". SGLang computes over all of them, and
    "; servers 4" shares them between several rollout servers. "; kind h20-96" names devices that
    nvidia-smi does not. With several hosts "; host 1" is for the second of them. "; zone west"
    comes last: rollout servers of a zone relay weights to each other, so that about one copy of
    them crosses the link to it."""
    hosts: tuple[str, ...] = ()
    """Addresses of the machines of the run, by which they reach each other: first that of this one,
    where all but the nodes of the others runs. The others join by `seamflow join`. Empty: this
    machine alone, on loopback. With several, calls between all processes have TLS, with
    certificates that the launcher makes."""
    console: bool = True
    """Start the console, whose link is printed: pages in a browser that show the run. Its death
    never ends the run. From another machine, forward its port by ssh."""
    console_port: int = Field(0, ge=0, le=65535)
    """Port of the console; 0: a free one, which --resume keeps."""
    join_port: int = Field(0, ge=0, le=65535)
    """Port at which other hosts join; 0: a free one, which --resume keeps."""
    trainer_ranks: int = Field(0, ge=0)
    """Processes of the trainer on each of its nodes, started by torchrun when more than one; 0: one
    for each of the node's GPUs, one without."""
    trainer_nodes: int = Field(1, ge=1)
    """Nodes that train together. Further nodes with the tag train are spares: one of them takes the
    place of a node that dies."""
    ranker: bool = False
    """Start the ranker, whose predicted rollout lengths the gateway uses; the order of turns is the
    gateway's `dispatch`."""
    reference: str | None = None
    """Hugging Face folder of a frozen reference or teacher model. A scoring service writes its
    log-probs as the column ref_logprobs for the trainer."""
    reward_model: str | None = None
    """Hugging Face folder of a frozen classifier with one output. A scoring service writes it as
    the reward reward_model, which algorithm.reward or algorithm.reward_weights of the trainer may
    name."""
    concurrency: int = Field(64, ge=1)
    """Rollouts the agent runner has in flight."""
    rollout_timeout: float = Field(600.0, gt=0)
    """Seconds a rollout of the agent runner may take before its sample is replaced."""
    token_audit: bool = False
    """The agent runner writes all tokens that it receives to received.jsonl too, and the summary
    says whether the store has each of them once: for tests."""
    redis_url: SecretStr | None = None
    """An existing Redis; also read from REDIS_URL. None: a private one."""
    runs_folder: str = "runs"
    """Where run folders are made."""
    seed: int = 0
    """Seeds the preparation, the order of tasks and the trainer."""
    set: tuple[Annotated[str, BeforeValidator(unpacked)], ...] = ()
    """Settings of the run's processes, as "trainer.num_steps=5"; stronger than file and variables.
    On the command line --set is repeated."""
    serve: bool = False
    """Keep the run's processes until Ctrl-C, for agents that connect from outside: no agent of the
    file is started, nothing is evaluated, and the run does not end. `seamflow serve` sets it."""
    resume: bool = False
    """Continue the run of this name from its newest checkpoint."""
    dry_run: bool = False
    """Check everything and print what would be started."""
    forecast: str = ""
    """With dry_run: a device, such as "h100-80", or its numbers, for which memory, seconds and cost
    of the run are forecast too, as by `seamflow plan`."""
    live: bool = True
    """Draw the live view if standard output is a terminal."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name is {self.name!r}: use letters, digits, '.', '_' and '-'")
        if self.name in ("latest", ".", ".."):
            raise ValueError(
                f"name is {self.name!r}, which stands for another folder: name the run otherwise"
            )
        if self.durability == "replicated" and self.redis_url is None:
            raise ValueError(
                "durability is 'replicated', and the private Redis has no replica: give redis_url, "
                "or use 'durable'"
            )
        self._check_agent()
        if own := flags_by_table(self.set).get("launcher"):
            raise ValueError(f"set holds settings of [launcher] itself: give {' '.join(own)}")
        number = len(self.training_nodes)
        if number < self.trainer_nodes:
            raise ValueError(
                f"trainer_nodes is {self.trainer_nodes} and {number} of nodes {list(self.nodes)} "
                "have the tag 'train': give it to more of them"
            )
        self._check_scoring()
        check_gpus(self.node_plans(), self.trainer_ranks)
        self._check_hosts()
        ranks_of(self.node_plans(), self.trainer_ranks)
        if self.forecast and not self.dry_run:
            raise ValueError(
                f"forecast is {self.forecast!r} without dry_run: give --dry-run too, or use "
                f"`seamflow plan --device {self.forecast}`"
            )
        return self

    def _check_hosts(self) -> None:
        check_hosts_of_nodes(self.node_plans(), self.hosts)

    def _check_scoring(self) -> None:
        needed = {"score": "reference", "reward": "reward_model"}
        for node in self.node_plans():
            for tag in needed.keys() & set(node.tags) - {plan.tag for plan in self.scorers}:
                raise ValueError(
                    f"nodes holds {node.node_id!r} with the tag {tag!r}, and {needed[tag]} is not "
                    "set: give the model that it computes with, or take the tag out"
                )

    def _check_agent(self) -> None:
        names = ("agent", "agent_command", "environment")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                " and ".join(f"{name} is {getattr(self, name)!r}" for name in given)
                + ": give agent for a class that the agent runner runs, agent_command for a "
                "program, or environment"
            )
        self._check_environment()
        if self.agent is not None and self.tasks is None:
            raise ValueError("tasks is not set: the agent runner leases tasks, so give some")
        if self.agent_command is not None and not _arguments(self.agent_command):
            raise ValueError(f"agent_command is {self.agent_command!r}: name a program")

    def _check_environment(self) -> None:
        if self.num_heldout and (self.environment is None or self.tasks is not None):
            raise ValueError(
                f"num_heldout is {self.num_heldout}, environment is {self.environment!r} and tasks "
                f"is {self.tasks!r}: only an environment's own tasks can be split; give "
                "heldout_tasks, or environment without tasks"
            )
        of_class = {
            "environment_arguments": self.environment_arguments,
            "environment_python": self.environment_python,
        }
        kind = environment_kind(self.environment) if self.environment is not None else "none"
        for name, value in of_class.items():
            if value and kind != "class":
                raise ValueError(
                    f"{name} is {value!r} and environment is {self.environment!r}: it belongs to "
                    "an environment class; give environment as 'package.module:Class'"
                )

    @property
    def runs_environment(self) -> bool:
        """Whether episodes of an environment are run instead of an agent."""
        return self.environment is not None and not self.serve

    @property
    def agent_arguments(self) -> tuple[str, ...]:
        """The agent's program and its arguments; none: the launcher starts no program."""
        if self.agent_command is None or self.serve:
            return ()
        return _arguments(self.agent_command)

    @property
    def runner_agent(self) -> str | None:
        """The class that the agent runner runs; None: the launcher starts no runner."""
        return None if self.serve else self.agent

    @property
    def are_agents_outside(self) -> bool:
        """Whether the launcher starts no agent: agents connect by themselves."""
        return self.kind_of_agents == "outside"

    @property
    def kind_of_agents(self) -> str:
        """Who works on tasks: "runner", "program", "environment" or "outside"."""
        if self.runs_environment:
            return "environment"
        if self.runner_agent is not None:
            return "runner"
        return "program" if self.agent_arguments else "outside"

    @property
    def has_http_gateway(self) -> bool:
        """Whether anything may call the model over HTTP."""
        if self.runs_environment:
            return environment_kind(self.environment or "") != "tool_loop"
        return self.runner_agent is None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that samples must have before they are trained."""
        scored = (plan.column for plan in self.scorers)
        return tuple(dict.fromkeys((*self.required_columns, *scored)))

    @property
    def scorers(self) -> tuple[ScorerPlan, ...]:
        return tuple(_scorers(self.reference, self.reward_model))

    @property
    def training_nodes(self) -> tuple[str, ...]:
        """The nodes that can train, spares among them."""
        return self.nodes_with("train")

    def nodes_with(self, tag: str) -> tuple[str, ...]:
        return tuple(node.node_id for node in self.node_plans() if tag in node.tags)

    def node_plans(self) -> list[NodePlan]:
        """The nodes; raises `ValueError` that shows the form."""
        return [node_plan(text) for text in self.nodes]

    @property
    def has_other_hosts(self) -> bool:
        """Whether parts of the run are on other machines."""
        return len(self.hosts) > 1

    @property
    def ranks_per_node(self) -> int:
        """Processes of the trainer on each of its nodes."""
        return ranks_of(self.node_plans(), self.trainer_ranks)


def _scorers(reference: str | None, reward_model: str | None) -> Iterator[ScorerPlan]:
    if reference is not None:
        yield ScorerPlan(
            tag="score",
            model=reference,
            column=REFERENCE_COLUMN,
            scorer="logprobs",
            service="scoring",
        )
    if reward_model is not None:
        yield ScorerPlan(
            tag="reward",
            model=reward_model,
            column=REWARD_COLUMN,
            scorer="reward_model",
            service="scoring-reward",
        )


def environment_kind(environment: str) -> Literal["class", "address", "tool_loop"]:
    """What the setting `environment` names.

    Raises:
        ValueError: none of the three forms.
    """
    if environment == "tool_loop":
        return "tool_loop"
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", environment):
        return "class"
    if all(re.fullmatch(r"[\w.\-\[\]:]+:\d+", each.strip()) for each in environment.split(",")):
        return "address"
    raise ValueError(
        f"environment is {environment!r}: write 'package.module:Class', 'host:port' or 'tool_loop'"
    )


def _arguments(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        message = f"agent_command is {command!r}: {error}; quote it as in a shell"
        raise ValueError(message) from error
