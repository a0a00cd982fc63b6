"""What a run's configuration says of its size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.sglang.command_line import num_devices
from services.chassis.config.load import load
from services.chassis.errors import ConfigError, UsageError
from services.launcher.checks.run_settings import check_settings
from services.launcher.cli import make_layout
from services.launcher.config import LauncherConfig, own_settings
from services.launcher.process_plan import plan
from services.lib.model_files.model_folder import vocabulary_size
from trainer.config import TrainerConfig

_PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of rollouts."""

    longest: int
    """Of the longest ones, prompts included: what memory must hold."""
    mean: int
    """On average: what takes time."""
    prompt: int
    """Prompt tokens of a rollout, which are not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """A run as far as memory and time depend on it."""

    trainer: TrainerConfig
    rollout: RolloutServerConfig
    nodes: tuple[tuple[str, ...], ...]
    """Capability tags of each node."""
    trainer_nodes: int
    ranks_per_node: int
    group_size: int
    groups_per_step: int
    max_staleness: int
    lengths: Lengths
    servers_per_node: int = 1

    @property
    def ranks(self) -> int:
        return self.trainer_nodes * self.ranks_per_node

    @property
    def tensor_parallel(self) -> int:
        """Devices of one engine."""
        return num_devices(self.rollout)

    @property
    def rollouts(self) -> int:
        return self.group_size * self.groups_per_step

    @property
    def rollout_nodes(self) -> int:
        """Nodes that can roll out."""
        return sum("rollout" in tags for tags in self.nodes)

    @property
    def shared_nodes(self) -> int:
        """Nodes that train and roll out: of those that can train, the first ones do."""
        training = [tags for tags in self.nodes if "train" in tags][: self.trainer_nodes]
        return sum("rollout" in tags for tags in training)

    @property
    def engines(self) -> int:
        return self.servers_per_node * self.rollout_nodes

    @property
    def devices(self) -> int:
        return sum(map(self.devices_of, self.nodes))

    def devices_of(self, tags: Collection[str]) -> int:
        """Devices of a node with these tags: as many as the activity that needs most."""
        return max(
            self.ranks_per_node if "train" in tags else 0,
            self.tensor_parallel * self.servers_per_node if "rollout" in tags else 0,
        )

    def changed(self, trainer: TrainerConfig, ranks_per_node: int) -> RunShape:
        """The same run with another trainer."""
        return replace(self, trainer=trainer, ranks_per_node=ranks_per_node)


def read_run(
    arguments: Sequence[str],
    *,
    longest: int | None = None,
    mean: int | None = None,
    prompt: int | None = None,
) -> RunShape:
    """Read a run as `seamflow train` reads it; nothing is started or written.

    Args:
        arguments: of `seamflow train`, --config among them.
        longest: tokens of the longest rollouts; None: max_context of [rollout_server], else
            batch.micro_batch_tokens of [trainer].
        mean: tokens of a rollout on average; None: as the longest.
        prompt: tokens of it that are not sampled; None: 512, at most half of the mean.

    Raises:
        StartupError: a setting or a number is wrong; it is named.
    """
    config = load(LauncherConfig, "launcher", [*own_settings(list(arguments)), "--dry-run"])
    layout = make_layout(config, _file(arguments))
    settings = check_settings(plan(config, layout).values()).values()
    trainer = next(each for each in settings if isinstance(each, TrainerConfig))
    rollout = next(each for each in settings if isinstance(each, RolloutServerConfig))
    _check(trainer)
    longest = longest or rollout.max_context or trainer.batch.micro_batch_tokens
    return RunShape(
        trainer=trainer,
        rollout=rollout,
        nodes=tuple(node.tags for node in config.node_plans()),
        trainer_nodes=config.trainer_nodes,
        ranks_per_node=config.ranks_per_node,
        group_size=config.group_size,
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        servers_per_node=max(node.servers for node in config.node_plans()),
        lengths=_lengths(longest, longest if mean is None else mean, prompt),
    )


def _file(arguments: Sequence[str]) -> Path:
    return Path(arguments[list(arguments).index("--config") + 1])


def _lengths(longest: int, mean: int, prompt: int | None) -> Lengths:
    prompt = min(_PROMPT_TOKENS, mean // 2) if prompt is None else prompt
    if not 1 <= prompt < mean <= longest:
        raise UsageError(
            f"--prompt-tokens is {prompt}, --mean-tokens {mean} and --rollout-tokens {longest}: "
            "each must be above the one before, and the first at least 1"
        )
    return Lengths(longest=longest, mean=mean, prompt=prompt)


def _check(trainer: TrainerConfig) -> None:
    if trainer.backend != "fsdp":
        raise ConfigError(
            f"trainer.backend is {trainer.backend!r}: a forecast counts the fsdp backend; set that"
        )
    for folder in filter(None, (trainer.model, trainer.critic_model)):
        try:
            vocabulary_size(folder)
        except ValueError as error:
            raise ConfigError(str(error)) from error
