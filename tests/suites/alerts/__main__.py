"""`make suite NAME=alerts`: each alert fires once by a real fault, and none in a healthy run.

Every process of a run and a real Prometheus, which scrapes and judges by the files of
deploy/monitoring/ in times divided by `--factor`. `--only FAULT` causes only these.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
import yaml
from seamflow.errors import PreconditionError

from bench.report import RESULTS, Report
from tests.lib.monitoring.monitoring_files import MONITORING, dashboards, rules
from tests.suites.alerts.alert_rig import HEALTHY_STEPS, AlertRig, alert_rig
from tests.suites.alerts.faults import FAULTS, Fault
from tests.suites.alerts.faulty_engine import LEAKED_BYTES, LEAKS
from tests.suites.alerts.memory import ALERT, Memory, memory_grows
from tests.suites.alerts.prometheus import (
    PACKAGE,
    Prometheus,
    missing_programs,
    prometheus,
    write_files,
)

BENCH = "test-alerts"
FACTOR = 30.0
_WAIT_SECONDS = 180.0
_HEALTHY_SECONDS = 75.0
"""More than TrainerStalled takes, 35 minutes, by the factor."""
NEVER = "LabelOfNobody"
"""The negative control: an alert that cannot fire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of the faults."""

    fired: set[str]
    """Alerts that fired by their fault."""
    false: dict[str, set[str]]
    """By fault, alerts that fired although it does not cause them."""
    empty: list[str]
    """Panels with a query that has no point."""
    memory: Memory


def rules_with_control() -> str:
    """The rules, and one whose expression names a label that no process has."""
    loaded = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    control = {"alert": NEVER, "expr": 'up{job="seamflow", process="trainer"} == 1', "for": "0m"}
    loaded["groups"][0]["rules"].append(control)
    return str(yaml.safe_dump(loaded))


async def until_up(found: Prometheus) -> None:
    """Until every target has been scraped."""
    while (
        len(found.get("query", query="up == 1")["result"])
        < len(found.get("targets")["activeTargets"])
        or not found.get("targets")["activeTargets"]
    ):
        await asyncio.sleep(1)


async def healthy(folder: Path, factor: float) -> set[str]:
    """Alerts that fire in a healthy run, at its normal end, or after it."""
    folder.mkdir()
    async with alert_rig(folder) as rig:
        write_files(folder, rig.ports, factor)
        with prometheus(folder) as found:
            await until_up(found)
            began = time.time()
            await rig.mistaken_calls()
            while await _steps(found) < HEALTHY_STEPS:
                with suppress(PreconditionError):  # the run has ended meanwhile
                    await asyncio.gather(rig.group(), rig.group())
            await asyncio.sleep(_HEALTHY_SECONDS)
            return found.fired_since(began)


async def _steps(found: Prometheus) -> int:
    rows = found.get("query", query="seamflow_trainer_step")["result"]
    return max((int(row["value"][1]) for row in rows), default=0)


async def faulty(folder: Path, factor: float, faults: tuple[Fault, ...]) -> Outcome:
    """What followed from the faults, one after the other."""
    fired: set[str] = set()
    false: dict[str, set[str]] = {}
    folder.mkdir()
    async with alert_rig(folder, num_steps=1_000_000) as rig:
        write_files(folder, rig.ports, factor, rules_with_control())
        with prometheus(folder) as found:
            await until_up(found)
            await rig.mistaken_calls()
            async with rig.playing():
                while await _steps(found) < 2:
                    await asyncio.sleep(1)
            for fault in faults:
                before, began = found.firing(), time.time()
                fired |= await caused(rig, found, fault, began)
                own = fault.fires | fault.may_fire
                false[fault.name] = found.fired_since(began) - before - own
                seconds = time.time() - began
                lines = (sorted(fault.fires - fired), sorted(false[fault.name]))
                print(f"{fault.name}: missing, false: {lines}, {seconds:.0f} s", flush=True)
                fired |= {NEVER} & found.fired_since(began)
            empty = empty_panels(found)
            memory = await leaked(rig, found)
            return Outcome(fired=fired, false=false, empty=empty, memory=memory)


async def leaked(rig: AlertRig, found: Prometheus) -> Memory:
    """Memory of a rollout server before and after it grew, as scraped."""
    before = _memory(found)
    rig.fault_file.write_text(LEAKS)
    async with rig.playing():
        while _memory(found) < LEAKED_BYTES:
            await asyncio.sleep(1)
    return Memory(before=before, after=_memory(found))


def _memory(found: Prometheus) -> float:
    query = 'process_resident_memory_bytes{instance="rollout-server-b:9100"}'
    return max(
        (float(row["value"][1]) for row in found.get("query", query=query)["result"]), default=0
    )


async def caused(rig: AlertRig, found: Prometheus, fault: Fault, began: float) -> set[str]:
    """Break what the fault breaks; which of its alerts fired meanwhile."""

    async def until() -> None:
        limit = time.monotonic() + _WAIT_SECONDS
        while not fault.fires <= found.fired_since(began) and time.monotonic() < limit:
            await asyncio.sleep(1)

    await fault.cause(rig, until)
    return set(fault.fires & found.fired_since(began))


def empty_panels(found: Prometheus) -> list[str]:
    """Panels with a query that has no point in the last hour."""
    return [
        f"{name}: {panel['title']}: {target['expr']}"
        for name, board in dashboards().items()
        for panel in board["panels"]
        for target in panel["targets"]
        if not found.points(target["expr"], 3600)
    ]


def never_fired(fired: set[str]) -> set[str]:
    """Alerts of deploy/monitoring/ that are not among them."""
    return {rule["alert"] for rule in rules()} - fired


def main() -> None:
    """Cause all, print and write the figures; exit 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--factor", type=float, default=FACTOR)
    parser.add_argument("--part", choices=["faults", "healthy"], help="one of them, no result")
    given = parser.parse_args()
    if missing := missing_programs():
        sys.exit(f"missing {', '.join(missing)}: apt-get install {PACKAGE}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    faults = tuple(fault for fault in FAULTS if not given.only or fault.name in given.only)
    with tempfile.TemporaryDirectory(prefix="alerts-") as name:
        folder = Path(name)
        calm: set[str] = set()
        if given.part != "faults":
            calm = asyncio.run(healthy(folder / "healthy", given.factor))
            print(f"healthy run: false {sorted(calm)}", flush=True)
        if given.part == "healthy":
            raise SystemExit(bool(calm))
        outcome = asyncio.run(faulty(folder / "faulty", given.factor, faults))
        recorded = {ALERT} if memory_grows(folder, outcome.memory) else set()
    never = never_fired(outcome.fired | recorded)
    print(f"never fired {sorted(never)}")
    print("empty panels", *outcome.empty, sep="\n")
    figures = {
        "alerts": len(rules()),
        "never_fired": len(never),
        "false": len(calm) + sum(map(len, outcome.false.values())),
        "by_recorded_series": len(recorded),
        "faults": len(faults),
        "empty_panels": len(outcome.empty),
        "panels": sum(len(board["panels"]) for board in dashboards().values()),
        "times_divided_by": given.factor,
        "negative_controls": 1,
        "negative_controls_failed": int(NEVER not in outcome.fired),
    }
    report = Report(bench=BENCH, figures=figures)
    report.show() if given.only or given.part else report.publish(RESULTS)
    wrong = figures["never_fired"] + figures["false"] + figures["empty_panels"]
    raise SystemExit(1 if wrong or not figures["negative_controls_failed"] else 0)


if __name__ == "__main__":
    main()
