"""Negative controls: one safety rule is off, and the checker must find just that violation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from tests.chaos.scheduler.checker import Verdict
from tests.chaos.scheduler.faults import (
    cut_nodes,
    freeze_agents,
    kill_scheduler,
    replace_agents,
    replace_scheduler,
)
from tests.chaos.scheduler.mixes.play import play_real, play_virtual
from tests.chaos.scheduler.outcome import Outcome
from tests.chaos.scheduler.rig import Variant
from tests.chaos.store.rig import Setting

_UNFENCED_AGENTS = Variant(agent="tests.lib.node_agent.unfenced")
_HASTY = Variant(scheduler="tests.chaos.scheduler.controls.ignore_leases")
_TWO_SCHEDULERS = Variant(scheduler="tests.chaos.scheduler.controls.unfenced_store")
_FORGETFUL = Variant(durable=False)
_UNFENCED_EFFECTS = Variant(worker_flags=("--unfenced",))
_UNCHECKED = Variant(worker_flags=("--unchecked",))
_GREEDY = Variant(policy="tests.chaos.scheduler.controls.partial_gangs:GreedyPolicy")
_MIXED = ("partial_gangs", "deadlocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A scenario without a safety rule."""

    run: Callable[[Setting], Awaitable[Outcome]]
    """The scenario."""
    finds: tuple[str, ...]
    """Fields of the verdict that must not be 0."""

    def seen(self, verdict: Verdict) -> bool:
        """Whether the checker saw what is wrong."""
        return all(getattr(verdict, name) > 0 for name in self.finds)


def controls() -> dict[str, Control]:
    """Every control by name."""
    return {
        "node agents that do not fence themselves": Control(
            run=partial(cut_nodes, partitions=8, variant=_UNFENCED_AGENTS),
            finds=("outlived_leases",),
        ),
        "leases that end before their nodes know": Control(
            run=partial(cut_nodes, partitions=8, variant=_HASTY), finds=("outlived_leases",)
        ),
        "schedulers without incarnations": Control(
            run=partial(replace_scheduler, replacements=2, variant=_TWO_SCHEDULERS),
            finds=("reused_epochs",),
        ),
        "a scheduler that forgets": Control(
            run=partial(kill_scheduler, kills=2, variant=_FORGETFUL), finds=("work_interrupted",)
        ),
        "effects without epochs": Control(
            run=partial(freeze_agents, freezes=8, variant=_UNFENCED_EFFECTS),
            finds=("stale_effects",),
        ),
        "workers without epochs": Control(
            run=partial(replace_agents, replacements=3, variant=_UNCHECKED),
            finds=("older_epochs",),
        ),
        "gangs one by one, by the rules": Control(
            run=partial(play_virtual, mixes=50, variant=_GREEDY), finds=_MIXED
        ),
        "gangs one by one, over gRPC": Control(
            run=partial(play_real, mixes=5, variant=_GREEDY), finds=_MIXED
        ),
    }
