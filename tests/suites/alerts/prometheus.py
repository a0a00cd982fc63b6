"""A real Prometheus with the rules and the configuration of deploy/monitoring/, in short times.

Every time in the configuration and the rules is divided by one factor: intervals, `for`, ranges and
offsets. Nothing else of an expression is changed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.lib.monitoring.monitoring_files import MONITORING
from tests.lib.redis_server import free_port

PACKAGE = "prometheus"
"""Debian's package with both programs."""
SCRAPE_SECONDS = 1.0
"""Between two scrapes, and between two evaluations of the rules."""
LEAST_FOR_SECONDS = 3.0
"""An alert waits for three scrapes at least, so that one that a busy machine loses is none."""
_START_SECONDS = 60.0
_TIMES = re.compile(r"\[(\d+)([smh])\]|\boffset (\d+)([smh])\b")
_UNITS = {"s": 1, "m": 60, "h": 3600}


def missing_programs() -> list[str]:
    """Of Prometheus, those that are not installed."""
    return [name for name in ("prometheus", "promtool") if shutil.which(name) is None]


def seconds_of(duration: str) -> float:
    """Of a duration such as "5m"."""
    return float(duration[:-1]) * _UNITS[duration[-1]]


def shortened(expression: str, factor: float) -> str:
    """The expression with its ranges and offsets divided by the factor."""

    def short(found: re.Match[str]) -> str:
        number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
        text = f"{round(float(number) * _UNITS[unit] * 1000 / factor)}ms"
        return f"[{text}]" if found[1] else f"offset {text}"

    return _TIMES.sub(short, expression)


def write_files(
    folder: Path, ports: Mapping[str, int], factor: float, rules: str | None = None
) -> None:
    """Write prometheus.yml and alerts.yml; targets that are not in `ports` are left out.

    Args:
        folder: of the files.
        ports: admin port by target, such as "trainer:9100".
        factor: by which times are divided.
        rules: text of other rules than those of deploy/monitoring/.
    """
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    every = f"{SCRAPE_SECONDS:g}s"
    config["global"] = dict.fromkeys(config["global"], every) | {"scrape_timeout": every}
    for job in config["scrape_configs"]:
        for targets in job["static_configs"]:
            targets["targets"] = [each for each in targets["targets"] if each in ports]
        # After the rules of the file, which read the address of the deployment.
        job["relabel_configs"] += [{"source_labels": ["__address__"], "target_label": "instance"}]
        job["relabel_configs"] += [
            {
                "source_labels": ["__address__"],
                "regex": re.escape(target),
                "target_label": "__address__",
                "replacement": f"127.0.0.1:{port}",
            }
            for target, port in ports.items()
        ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    alerts = yaml.safe_load(rules or (MONITORING / "alerts.yml").read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            rule["expr"] = shortened(rule["expr"], factor)
            if waits := seconds_of(rule["for"]):
                rule["for"] = f"{max(waits / factor, LEAST_FOR_SECONDS) * 1000:.0f}ms"
    (folder / "alerts.yml").write_text(yaml.safe_dump(alerts))


class Prometheus:
    """A running one, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def fired_since(self, began: float) -> set[str]:
        """Names of the alerts that fired at any time since then, in seconds since the epoch."""
        seconds = max(time.time() - began, SCRAPE_SECONDS)
        query = f'max_over_time(ALERTS{{alertstate="firing"}}[{seconds * 1000:.0f}ms])'
        return {row["metric"]["alertname"] for row in self.get("query", query=query)["result"]}

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        found = self.get("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in found if each["state"] == "firing"}

    def points(self, expression: str, seconds: float) -> int:
        """Points of all series of a query over the last seconds; NaN is none."""
        now = time.time()
        span = {"start": f"{now - seconds:.3f}", "end": f"{now:.3f}", "step": "5"}
        rows = self.get("query_range", query=expression, **span)["result"]
        return sum(value != "NaN" for row in rows for _, value in row["values"])


@contextmanager
def prometheus(folder: Path) -> Iterator[Prometheus]:
    """Run it on the files of the folder; promtool checks them first."""
    config = folder / "prometheus.yml"
    subprocess.run(["promtool", "check", "config", str(config)], check=True, capture_output=True)
    port = free_port()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        found, limit = Prometheus(port), time.monotonic() + _START_SECONDS
        while True:
            try:
                found.get("query", query="1")
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < limit, folder
                time.sleep(0.1)
        yield found
    finally:
        process.terminate()
        process.wait()
