"""MemoryGrows by series that were recorded from a real process: six hours do not pass in a test."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.lib.monitoring.monitoring_files import MONITORING, rules

ALERT = "MemoryGrows"
_LABELS = {"job": "seamflow", "instance": "rollout-server-b:9100", "service": "rollout-server"}
_MINUTES = 10  # from one value to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a real process had, in bytes."""

    before: float
    after: float


def memory_grows(folder: Path, memory: Memory) -> bool:
    """Whether the alert fires hours after the growth, and not of a process that begins with it.

    The values are those that Prometheus scraped, each held for as long as the rule looks back.
    """
    grown = f"{memory.before:.0f}+0x60 {memory.after:.0f}+0x24"  # ten hours, four more
    begun = f"{memory.before:.0f} {memory.after:.0f}+0x83"
    return _agrees(folder, grown, {"9h": False, "11h": True}) and _agrees(
        folder, begun, {f"{hour}h": False for hour in range(14)}
    )


def _agrees(folder: Path, values: str, fires: dict[str, bool]) -> bool:
    """Whether promtool says that the alert fires at these times, and is silent at others."""
    rule = next(rule for rule in rules() if rule["alert"] == ALERT)
    instance = {"{{ $labels.instance }}": _LABELS["instance"]}
    notes = {name: _filled(text, instance) for name, text in rule["annotations"].items()}
    alert = {"exp_labels": {**_LABELS, **rule["labels"]}, "exp_annotations": notes}
    labels = ", ".join(f'{name}="{value}"' for name, value in _LABELS.items())
    test = {
        "interval": f"{_MINUTES}m",
        "input_series": [
            {"series": f"process_resident_memory_bytes{{{labels}}}", "values": values},
            {"series": f"process_start_time_seconds{{{labels}}}", "values": "1+0x84"},
        ],
        "alert_rule_test": [
            {"eval_time": time, "alertname": ALERT, "exp_alerts": [alert] if fired else []}
            for time, fired in fires.items()
        ],
    }
    config = {
        "rule_files": [str(MONITORING / "alerts.yml")],
        "evaluation_interval": f"{_MINUTES}m",
        "tests": [test],
    }
    file = folder / "memory_test.yml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(done.stdout, done.stderr)
    return done.returncode == 0


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text
