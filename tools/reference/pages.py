"""The generated pages: configuration, the chart, permissions, benchmarks, reliability."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.reference.benchmarks import benchmarks_page
from tools.reference.chart import chart_page, chart_schema
from tools.reference.configuration import configuration_page, json_schema
from tools.reference.permissions import permissions_page
from tools.reference.reliability import reliability_page

ROOT = Path(__file__).parents[2]
PAGES: Mapping[str, Callable[[], str]] = {
    "docs/configuration.md": configuration_page,
    "docs/configuration.schema.json": json_schema,
    "deploy/helm/seamflow/values.schema.json": chart_schema,
    "deploy/helm/seamflow/README.md": chart_page,
    "docs/permissions.md": permissions_page,
    "docs/benchmarks.md": lambda: benchmarks_page(ROOT),
    "docs/reliability.md": lambda: reliability_page(ROOT),
}


def main() -> None:
    """Write the pages, or with --check name those that are not current and exit with 1."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    stale = [name for name, page in PAGES.items() if _read(name) != page()]
    if arguments.check:
        sys.exit(f"not current: {', '.join(stale)}; run make docs" if stale else 0)
    for name in stale:
        (ROOT / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote {name}")


def _read(name: str) -> str:
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else ""
