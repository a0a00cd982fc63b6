"""The suite of alerts: it leaves none out, and shortens times alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.lib.monitoring.monitoring_files import rules
from tests.suites.alerts.__main__ import never_fired
from tests.suites.alerts.faults import FAULTS
from tests.suites.alerts.memory import ALERT
from tests.suites.alerts.prometheus import shortened, write_files


def test_every_alert_has_a_fault_that_causes_it() -> None:
    """But for the one of recorded series."""
    caused = {alert for fault in FAULTS for alert in fault.fires}
    assert never_fired(caused | {ALERT}) == set()


def test_an_alert_that_did_not_fire_is_reported() -> None:
    """Negative control."""
    every = {rule["alert"] for rule in rules()}
    assert never_fired(every - {"ServiceDown"}) == {"ServiceDown"}


@pytest.mark.parametrize(
    ("written", "short"),
    [
        ('rate(a{b="5m"}[5m]) > 60', 'rate(a{b="5m"}[10000ms]) > 60'),
        ("a > 2 * a offset 6h and a > 2e9", "a > 2 * a offset 720000ms and a > 2e9"),
    ],
)
def test_times_alone_are_divided(written: str, short: str) -> None:
    """Thresholds and labels stay."""
    assert shortened(written, 30) == short


def test_targets_keep_the_names_that_the_file_reads(tmp_path: Path) -> None:
    """The address is replaced after the relabelling of the file; others are left out."""
    write_files(tmp_path, {"trainer:9100": 1234}, 30)
    (job,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["trainer:9100"]}]
    assert [rule["target_label"] for rule in job["relabel_configs"]] == [
        *("service", "instance", "__address__")
    ]
