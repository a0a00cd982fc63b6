"""`make chaos-edges`: what one agent's mistake, one broken server or one flipped bit costs, and how
soon a run names what stands still.

`--quick` divides every count; `--only broken.nan abuse.message_of_10_mb` runs some scenarios.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from bench.report import Report
from tests.chaos.edges.abuse import under_abuse
from tests.chaos.edges.abuser import ABUSES
from tests.chaos.edges.broken_server import share_of_groups_lost
from tests.chaos.edges.faulty_engine import FAULTS
from tests.chaos.store.rig import Setting
from tests.chaos.suite import Suite, broken_limits, exit_if_broken

BENCH = "chaos-edges"
_MODULES = ("poison", "damage", "floods", "frozen")
"""Modules of this folder with `run(seed) -> dict[str, float]`, run if they are there."""
_MAX_LOST_SHARE = 0.02
_MAX_P99_RATIO = 3.0
_MAX_GROWTH_MIB = 512.0
_CONTROL_FAULTS = ("nan", "false_context", "empty")
_CONTROL_ABUSES = ("message_of_10_mb", "template_that_loops", "template_that_grows")
_ZERO = (
    *("runs_poisoned", "floods.kinds_kept", "floods.foreign_leases"),
    *("frozen.unnamed", "frozen.misnamed", "frozen.summaries_missing"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run."""

    kind: str
    """"broken", "abuse" or "module"."""
    name: str
    """Fault, abuse or module."""
    count: int = 0
    """Groups, or seconds of each phase."""
    protected: bool = True
    """False for a control."""


def scenarios(divisor: int) -> dict[str, Scenario]:
    """All runs; faults count groups, abuses seconds."""
    groups, seconds = max(20, 200 // divisor), max(2, 4 // divisor)
    found = {f"broken.{name}": Scenario(kind="broken", name=name, count=groups) for name in FAULTS}
    found |= {f"abuse.{name}": Scenario(kind="abuse", name=name, count=seconds) for name in ABUSES}
    for name in _CONTROL_FAULTS:
        control = Scenario(kind="broken", name=name, count=20, protected=False)
        found[f"control.{name}"] = control
    for name in _CONTROL_ABUSES:
        control = Scenario(kind="abuse", name=name, count=seconds, protected=False)
        found[f"control.{name}"] = control
    return found | {name: Scenario(kind="module", name=name) for name in _MODULES}


def run(name: str, scenario: Scenario, setting: Setting) -> dict[str, float]:
    """The figures of one scenario, under names that begin with its own."""
    folder = setting.folder / name
    match scenario.kind:
        case "broken":
            share = asyncio.run(
                share_of_groups_lost(
                    folder,
                    scenario.name,
                    scenario.count,
                    setting.seed,
                    ejection=scenario.protected,
                )
            )
            return {f"{name}.groups_lost_share": share}
        case "abuse":
            result = asyncio.run(
                under_abuse(folder, scenario.name, scenario.count, limits=scenario.protected)
            )
            setting.progress.console.print(f"{name}: {dict(result.codes)}")
            return {
                f"{name}.p99_ratio": result.p99_ratio,
                f"{name}.growth_mib": result.growth_bytes / 2**20,
                f"{name}.calls": float(result.codes.total()),
            }
    return _run_module(scenario.name, setting)


def _run_module(name: str, setting: Setting) -> dict[str, float]:
    module = f"tests.chaos.edges.{name}"
    if find_spec(module) is None:
        setting.progress.console.print(f"{name}: {module} is not there, skipped")
        return {}
    found: dict[str, float] = importlib.import_module(module).run(setting.seed)
    return found


def with_controls(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures, and how many controls ran and showed the damage."""
    shown = [
        figures[name] > _MAX_LOST_SHARE
        for name in (f"control.{fault}.groups_lost_share" for fault in _CONTROL_FAULTS)
        if name in figures
    ]
    abuses = (f"control.{name}" for name in _CONTROL_ABUSES)
    shown += [_harms(figures, name) for name in abuses if f"{name}.p99_ratio" in figures]
    number = figures.get("negative_controls", 0.0) + len(shown)
    failed = figures.get("negative_controls_failed", 0.0) + sum(shown)
    return {**figures, "negative_controls": number, "negative_controls_failed": failed}


def _harms(figures: Mapping[str, float], control: str) -> bool:
    """Others wait, memory grows, or its calls never end."""
    is_slow = figures[f"{control}.p99_ratio"] > _MAX_P99_RATIO
    is_large = figures[f"{control}.growth_mib"] > _MAX_GROWTH_MIB
    return is_slow or is_large or figures[f"{control}.calls"] == 0


def broken(figures: Mapping[str, float]) -> list[str]:
    """The limits that the figures break, by name."""
    limits = {
        "groups_lost_share": _MAX_LOST_SHARE,
        "p99_ratio": _MAX_P99_RATIO,
        "growth_mib": _MAX_GROWTH_MIB,
    }
    kinds = {
        name: limits[kind]
        for name in figures
        if (kind := name.rpartition(".")[2]) in limits and not name.startswith("control.")
    }
    return broken_limits(figures, kinds, _ZERO)


def run_all(
    names: Sequence[str], chosen: Mapping[str, Scenario], setting: Setting
) -> dict[str, float]:
    """One scenario after the other."""
    figures: dict[str, float] = {}
    bar = setting.progress.add_task("scenarios", total=len(names))
    for name in names:
        for figure, value in run(name, chosen[name], setting).items():
            is_count = figure.startswith("negative_controls")
            figures[figure] = value + (figures.get(figure, 0.0) if is_count else 0.0)
            setting.progress.console.print(f"{figure} {value:.3f}")
        setting.progress.advance(bar)
    return with_controls(figures)


def main() -> None:
    """Run the scenarios, print and write the figures; exit 1 if a limit is broken."""
    suite = Suite[Scenario].from_arguments(__doc__, scenarios)
    with suite.setting() as setting:
        figures = run_all(suite.names, suite.chosen, setting)
        folder = suite.report_folder(setting)
        raw = {name: [value] for name, value in figures.items()}
        Report(bench=BENCH, figures=figures, raw=raw, seeds=[suite.seed]).publish(folder)
    exit_if_broken(broken(figures))


if __name__ == "__main__":
    main()
