"""docs/benchmarks.md, from bench/results/*.json and bench/benchmarks.toml."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from seamflow.release import RELEASE

from bench.provenance import benchmarks

_HEADER = """# Benchmarks

Generated from `bench/results/*.json` by `make docs`; do not edit.

Every figure is of the machine that its line names: two CPU cores and no GPU but for
`make bench-gpu`. Ratios are of interleaved runs on the same machine, ours over the other
side's; `_lowest` and `_highest` are single rounds. A figure holds for its commit and may differ
today; those of earlier releases are not shown.
"""
_EARLIER = """## Results of earlier releases

The code has changed much since, so their figures are no longer shown. The commands measure again.

| what | command | last result |
|---|---|---|"""


def benchmarks_page(root: Path) -> str:
    """The page as Markdown."""
    parts, earlier = [_HEADER], [_EARLIER]
    for name, about in benchmarks().items():
        file = root / "bench" / "results" / f"{name}.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text(encoding="utf-8"))
        if is_of_this_release(result):
            parts.append(_section(name, about, result))
        else:
            earlier.append(_line(name, about, result))
    return "\n".join([*parts, *(earlier if len(earlier) > 1 else []), ""])


def is_of_this_release(result: Mapping[str, Any], release: str = RELEASE) -> bool:
    """Whether a result was measured with code of a release."""
    version = str(result["versions"].get("seamflow", ""))
    return version.startswith(f"{release}.")


def _line(name: str, about: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    version = result["versions"].get("seamflow", "earlier")
    link = f"[{version}, commit {result['commit']}, {result['date']}](../bench/results/{name}.json)"
    return f"| {about['title']} | `{about['command']}` | {link} |"


def _section(name: str, about: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    note = f"\n{about['note']}\n" if "note" in about else ""
    rows = "\n".join(f"| `{figure}` | {value:,.4g} |" for figure, value in _shown(about, result))
    return (
        f"## {about['title']}\n\n`{about['command']}` · {_origin(result)} · "
        f"[all figures](../bench/results/{name}.json)\n{note}\n"
        f"| figure | value |\n|---|---|\n{rows}\n"
    )


def _origin(result: Mapping[str, Any]) -> str:
    """Commit, date, machine and runs."""
    parts = [f"commit {result['commit']}", result["date"], result["machine"]]
    return ", ".join([*parts, _runs(result["runs"])])


def _runs(number: int) -> str:
    return f"{number} sample{'s' * (number != 1)} per figure at most"


def _shown(about: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for pattern in about["figures"]:
        for figure, value in result["figures"].items():
            if fnmatch.fnmatchcase(figure, pattern):
                yield figure, value
