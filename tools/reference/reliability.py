"""docs/reliability.md, from bench/scorecard.toml, bench/suites.toml and bench/results/*.json."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.provenance import benchmarks
from tools.reference.benchmarks import is_of_this_release
from tools.suites.passes import last_passes, suites

_HEADER = """# Reliability

What was asked of seamflow, and what shows that it holds. Generated from `bench/scorecard.toml` and
`bench/results/*.json` by `make docs`; do not edit. [guarantees.md](guarantees.md) lists what you
may rely on, line by line.

- **met**: every figure is within its target. **partly**: within it, but less was tried than asked
  for. **not met**: a figure is beyond its target; argued: we hold another one to be right, and
  say why. **by tests**: the named tests of `make test` show it; there is no figure.
  **not measured**: the command has left no result yet.
- 0 of 50 says that the rate is below about 6 % (95 %). The commands run their negative controls
  too, and fail if one of them does not fail. A figure holds for the commit of its result;
  where that is of an earlier release, the row says so, and the named tests hold for today's code.
"""
_SUITES = """
## Suites outside `make test`

Each has a short form in `make test`; `.ci/run` takes one whole suite each time, in rotation, and
`make suite NAME=...` runs one and records that it passed. This is when each last passed
whole, as recorded in `bench/suite_passes.json`.

| suite | shows | last passed whole | commit | minutes | short form |
|---|---|---|---|---|---|"""
_TABLE = "| # | asked for | verdict | shown by |\n|---|---|---|---|"


class Scorecard:
    """The rows, and the results that they name."""

    def __init__(self, root: Path) -> None:
        text = (root / "bench" / "scorecard.toml").read_text(encoding="utf-8")
        self.rows: list[dict[str, Any]] = tomllib.loads(text)["row"]
        self._results = root / "bench" / "results"
        self._read: dict[str, dict[str, Any] | None] = {}

    def result(self, name: str) -> dict[str, Any] | None:
        """A result; None: there is none yet."""
        if name not in self._read:
            file = self._results / f"{name}.json"
            self._read[name] = json.loads(file.read_text()) if file.exists() else None
        return self._read[name]

    def value(self, figure: str) -> float | None:
        """A figure by "result.name"; None: its result does not exist yet.

        Raises:
            KeyError: the result has no such figure.
        """
        name, _, key = figure.partition(".")
        result = self.result(name)
        return None if result is None else float(result["figures"][key])

    def verdict(self, row: Mapping[str, Any]) -> str:
        """One of the words that the page explains."""
        most = [(self.value(name), limit) for name, limit in row.get("at_most", {}).items()]
        least = [(self.value(name), limit) for name, limit in row.get("at_least", {}).items()]
        if not most and not least:
            return "by tests" if "missing" not in row else "partly, by tests"
        if any(value is None for value, _ in (*most, *least)):
            return "not measured"
        if any(value is not None and value > limit for value, limit in most):
            return "**not met**, argued" if "argued" in row else "**not met**"
        is_short = any(value is not None and value < limit for value, limit in least)
        return "partly" if is_short or "missing" in row else "met"


def reliability_page(root: Path) -> str:
    card = Scorecard(root)
    lines = [
        f"| {number} | {row['what']} | {card.verdict(row)} | {'<br>'.join(_evidence(card, row))} |"
        for number, row in enumerate(card.rows, 1)
    ]
    return "\n".join([_HEADER, _TABLE, *lines, _SUITES, *_suite_rows(root), ""])


def _suite_rows(root: Path) -> Iterator[str]:
    passes = last_passes(root)
    for suite in suites(root):
        done = passes.get(suite.name)
        when = "not recorded | | " if done is None else f"{done.date} | `{done.commit}` | "
        minutes = "" if done is None or done.seconds is None else f"{done.seconds / 60:.1f}"
        short = f"[{Path(suite.short).name}](../{suite.short})"
        yield f"| `make {suite.name}` | {suite.about} | {when}{minutes} | {short} |"


def _evidence(card: Scorecard, row: Mapping[str, Any]) -> Iterator[str]:
    names = _figures(row)
    for result in dict.fromkeys(name.partition(".")[0] for name in names):
        own = [name for name in names if name.partition(".")[0] == result]
        yield _of_result(card, result, own, row)
    if tests := row.get("tests"):
        yield ", ".join(map(_link, tests))
    yield from (row[key] for key in ("note", "argued", "missing") if key in row)


def _figures(row: Mapping[str, Any]) -> list[str]:
    named = (*row.get("at_most", ()), *row.get("at_least", ()), *row.get("shown", ()))
    return list(dict.fromkeys(named))


def _of_result(card: Scorecard, name: str, figures: list[str], row: Mapping[str, Any]) -> str:
    """Command and figures of one result, with the bounds of those that have one."""
    found = card.result(name)
    about = benchmarks().get(name, {})
    command = about.get("command", row.get("command"))
    if found is None:
        return f"`{command}`: no result yet"
    shown = ", ".join(_figure(card, figure, row) for figure in figures)
    version = found["versions"].get("seamflow", "before 0.3")
    of = "" if is_of_this_release(found) else f" (measured with {version})"
    return f"[`{command}`](../bench/results/{name}.json){of}: {shown}"


def _figure(card: Scorecard, figure: str, row: Mapping[str, Any]) -> str:
    value = f"{figure.partition('.')[2]} {card.value(figure):,.4g}"
    if (most := row.get("at_most", {}).get(figure)) is not None:
        return f"{value} (≤ {most:g})"
    if (least := row.get("at_least", {}).get(figure)) is not None:
        return f"{value} (≥ {least:g})"
    return value


def _link(test: str) -> str:
    file, _, function = test.partition("::")
    return f"[`{function}`](../{file})"
