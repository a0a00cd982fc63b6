"""docs/benchmarks.md, from bench/results/*.json and bench/benchmarks.toml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from seamflow.release import RELEASE

from tools.provenance import benchmarks

_HEADER = """# Benchmarks

Generated from `bench/results/*.json` by `make docs`; do not edit.

Every figure is of the machine that its line names: two CPU cores and no GPU but for
`make bench-gpu`. Ratios are of interleaved runs on the same machine, ours over the other
side's. A figure holds for its commit and may differ today; those of earlier releases are not shown.
"""
_OTHERS = """## All other results

`bench/benchmarks.toml` says what the figures of each result mean, and what is emulated.

| what | command | last result |
|---|---|---|"""


def benchmarks_page(root: Path) -> str:
    """The page as Markdown: a section for each headline, a line for each other result."""
    sections, others = [_HEADER], [_OTHERS]
    for name, about in benchmarks().items():
        file = root / "bench" / "results" / f"{name}.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text(encoding="utf-8"))
        if "headline" in about and is_of_this_release(result):
            sections.append(_section(name, about, result))
        else:
            others.append(_line(name, about, result))
    return "\n".join([*sections, *others, ""])


def is_of_this_release(result: Mapping[str, Any], release: str = RELEASE) -> bool:
    """Whether a result was measured with code of a release."""
    version = str(result["versions"].get("seamflow", ""))
    return version.startswith(f"{release}.")


def _line(name: str, about: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    version = "" if is_of_this_release(result) else "an earlier release, "
    link = f"[{version}commit {result['commit']}, {result['date']}](../bench/results/{name}.json)"
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
    for figure in about["headline"]:
        yield figure, result["figures"][figure]
