"""Which rewards the settings name; checked before the trainer sees any."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from services.launcher.checks.process_settings import process_setting
from services.launcher.config import REWARD_COLUMN, LauncherConfig


def trained_rewards(config: LauncherConfig, config_file: Path) -> Collection[str]:
    """Names in reward_weights or reward of [trainer.algorithm]; none: neither is set."""
    weights = process_setting(config, config_file, "trainer.algorithm.reward_weights")
    if isinstance(weights, str):
        with suppress(ValueError):  # the trainer's own check names it
            weights = json.loads(weights)
    if isinstance(weights, dict) and weights:
        return weights.keys()
    name = process_setting(config, config_file, "trainer.algorithm.reward")
    return (str(name),) if name else ()


def check_reward_names(config: LauncherConfig, settings: Mapping[str, ServerConfig]) -> list[str]:
    """Check what settings name against the rewards that rollouts will have, where those are known.

    Others are checked with the first rollouts (trainer/data/trained_reward.py).

    Returns:
        A warning of a reward model that is not trained on.

    Raises:
        ConfigError: a setting names a reward that no rollout has, or names none of several.
    """
    processes = [*settings.values()]
    named = [(setting, name) for setting, name in _named(config, processes) if name]
    known = _known(config, processes)
    trained = [name for setting, name in named if setting.startswith("trainer.")]
    if known is not None:
        for setting, name in named:
            _check_known(setting, name, known)
        if not trained and "reward" not in known and len(known) > 1:
            raise ConfigError(
                f"rollouts have the rewards {_shown(known)}, and none is named to train on: give "
                "reward or reward_weights in [trainer.algorithm]"
            )
    if config.reward_model is None or REWARD_COLUMN in (name for _, name in named):
        return []
    return [
        f"reward_model is {config.reward_model!r}, and no setting names its reward: it is trained "
        f"on only where a rollout has no other; give reward = {REWARD_COLUMN!r}, or "
        f"{REWARD_COLUMN} among reward_weights, in [trainer.algorithm]"
    ]


def _named(config: LauncherConfig, settings: Collection[Any]) -> Iterator[tuple[str, str]]:
    """Each setting that names a reward, and the name."""
    for name in ("zero_variance_reward", "reward_name", "replay_reward_name"):
        yield f"launcher.{name}", getattr(config, name)
    for each in settings:
        if (algorithm := getattr(each, "algorithm", None)) is not None:
            yield "trainer.algorithm.reward", algorithm.reward
            yield from (("trainer.algorithm.reward_weights", w) for w in algorithm.reward_weights)
        if hasattr(each, "metric"):
            yield "evaluation.metric", each.metric
        if hasattr(each, "curriculum") and (each.max_samples or each.curriculum.share < 1):
            yield "dataloader.success_reward", each.success_reward


def _known(config: LauncherConfig, settings: Collection[Any]) -> Collection[str] | None:
    """Names of all rewards that a rollout has; None: only the first rollouts will tell."""
    loops = [each.rewards for each in settings if hasattr(each, "answer_pattern")]
    has_server = any(getattr(each, "reward_server", None) for each in settings)
    # A function may give several.
    if not loops or has_server or any(_is_function(how) for how in loops[0].values()):
        return None
    return [*loops[0], *([REWARD_COLUMN] if config.reward_model else [])]


def _is_function(how: str) -> bool:
    return ":" in how and not how.startswith("regex:")


def _check_known(setting: str, name: str, known: Collection[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    cure = f"did you mean {near[0]!r}?" if near else "name one of them"
    raise ConfigError(f"{setting} names {name!r}, and rollouts have {_shown(known)}: {cure}")


def _shown(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "no rewards"
