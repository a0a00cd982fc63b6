"""Rules as they are, judged by promtool on series of hours, which do not pass in a test."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.lib.monitoring.monitoring_files import MONITORING, rules

_LABELS = {"job": "seamflow", "instance": "process:9100", "service": "process"}
_INSTANCE = "{{ $labels.instance }}"


def agrees(
    folder: Path, alert: str, series: Mapping[str, str], fires: Mapping[str, bool], minutes: int
) -> bool:
    """Whether promtool says that the alert fires at these times, and is silent at others.

    Args:
        folder: for the file of the test.
        alert: its name.
        series: values by metric, in promtool's notation; all are of one process.
        fires: by time, such as "9h", whether it fires.
        minutes: from one value to the next, and between two evaluations.
    """
    rule = next(rule for rule in rules() if rule["alert"] == alert)
    notes = {k: text.replace(_INSTANCE, _LABELS["instance"]) for k, text in _notes(rule).items()}
    fired = {"exp_labels": {**_LABELS, **rule["labels"]}, "exp_annotations": notes}
    labels = ", ".join(f'{name}="{value}"' for name, value in _LABELS.items())
    test = {
        "interval": f"{minutes}m",
        "input_series": [
            {"series": f"{metric}{{{labels}}}", "values": values}
            for metric, values in series.items()
        ],
        "alert_rule_test": [
            {"eval_time": time, "alertname": alert, "exp_alerts": [fired] if does else []}
            for time, does in fires.items()
        ],
    }
    config = {
        "rule_files": [str(MONITORING / "alerts.yml")],
        "evaluation_interval": f"{minutes}m",
        "tests": [test],
    }
    file = folder / "rule_test.yml"
    file.write_text(yaml.safe_dump(config))
    command = ["promtool", "test", "rules", str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr)
    return done.returncode == 0


def _notes(rule: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    return rule["annotations"]
