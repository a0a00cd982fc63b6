"""Dashboards, alert rules and runbooks: well-formed, and complete."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.lib.monitoring.monitoring_files import MONITORING, ROOT, dashboards, metrics_in, rules

RUNBOOKS = ROOT / "docs" / "runbooks"
NO_ALERT = {"restore"}
"""Runbooks of what a person decides to do."""
_DURATION = re.compile(r"\d+[smh]")
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def alerts() -> set[str]:
    """Names of all alerts."""
    return {rule["alert"] for rule in rules()}


def test_every_alert_has_a_runbook_and_the_other_way_round() -> None:
    """A page without an alert is never opened, an alert without a page does not help."""
    pages = {page.stem for page in RUNBOOKS.glob("*.md")}
    assert alerts() == pages - NO_ALERT
    assert all(rule["annotations"]["runbook"] == _page(rule["alert"]) for rule in rules())


def _page(alert: str) -> str:
    return f"docs/runbooks/{alert}.md"


def test_rules_have_the_form_that_prometheus_reads() -> None:
    """Names once, an expression with a metric and balanced brackets, a duration, a severity."""
    assert len(alerts()) == len(rules()) > 10
    for rule in rules():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, rule
        assert _DURATION.fullmatch(rule["for"]), rule
        assert rule["labels"]["severity"] in {"page", "warn"}
        assert metrics_in(rule["expr"]), rule
        assert balanced(rule["expr"]), rule


def test_the_example_loads_the_rules() -> None:
    """Prometheus finds alerts.yml beside it, and the job has the name that rules ask for."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert [(MONITORING / name).exists() for name in config["rule_files"]] == [True]
    assert [job["job_name"] for job in config["scrape_configs"]] == ["seamflow"]


def test_dashboards_have_the_form_that_grafana_imports() -> None:
    """An id and a title each, panels side by side, queries with balanced brackets."""
    boards = dashboards()
    assert len({board["uid"] for board in boards.values()}) == len(boards) >= 2
    for board in boards.values():
        places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
        assert len(set(places)) == len(places)
        for panel in board["panels"]:
            assert panel["title"]
            assert all(balanced(target["expr"]) for target in panel["targets"]), panel["title"]


def test_what_runbooks_link_to_exists() -> None:
    """Pages beside them and in docs/."""
    for page in RUNBOOKS.glob("*.md"):
        for target in _LINK.findall(page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), (page, target)


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (le) (rate(a_bucket{x="y z"}[5m])) > 1', {"a_bucket"}),
        ("max(a) - min(b) and on (instance) c > 0", {"a", "b", "c"}),
    ],
)
def test_names_of_metrics_are_found(expression: str, names: set[str]) -> None:
    """Labels, functions and durations are none."""
    assert metrics_in(expression) == names


def balanced(expression: str) -> bool:
    """Whether every bracket is closed."""
    left: list[str] = []
    for letter in expression:
        if letter in "([{":
            left.append({"(": ")", "[": "]", "{": "}"}[letter])
        elif letter in ")]}" and (not left or left.pop() != letter):
            return False
    return not left


def test_an_open_bracket_is_noticed() -> None:
    """Negative control."""
    assert not balanced("sum(rate(a[5m])")
