"""Small workloads and settings of the simulated comparison."""

from __future__ import annotations

from dataclasses import replace

from bench.sim.costs import load_costs
from bench.sim.modes import MODES, Split
from bench.sim.simulator.simulation import Setting
from bench.sim.workloads import LogNormal, Workload

_NEVER = LogNormal(median=0.0, sigma=0.0, most=0.0, prompt_share=0.0)

SINGLE = Workload(
    name="small_single",
    least_turns=1,
    most_turns=1,
    prompt_tokens=64,
    output_tokens=LogNormal(median=300.0, sigma=0.745, most=3000.0, prompt_share=0.7),
    tool_tokens=0,
    tool_seconds=_NEVER,
    most_context=4096,
    group_size=4,
    groups_per_step=16,
    slots=16,
    rollouts_per_node=20,
    max_staleness=2,
)
"""One turn each."""

AGENTIC = replace(
    SINGLE,
    name="small_agentic",
    least_turns=2,
    most_turns=6,
    tool_tokens=50,
    tool_seconds=LogNormal(median=3.0, sigma=1.2, most=60.0, prompt_share=0.0),
)
"""Several turns with tools between them."""

LENT = Split(rollout=1, train=0, both=3)
"""More nodes that train than that roll out."""


def split(mode: str) -> Split:
    """Four nodes for a mode."""
    match MODES[mode].kind:
        case "colocated":
            return Split(rollout=0, train=0, both=4)
        case "disaggregated":
            return Split(rollout=2, train=2, both=0)
        case _:
            return Split(rollout=2, train=0, both=2)


def setting(mode: str = "multiplexed", workload: Workload = SINGLE) -> Setting:
    """A run of a few steps."""
    return Setting(
        mode=MODES[mode],
        workload=workload,
        split=split(mode),
        costs=load_costs(),
        warm_up=1,
        steps=3,
    )
