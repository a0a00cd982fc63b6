"""When each suite last passed whole: bench/suites.toml, and bench/suite_passes.json."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_SUITES = Path("bench/suites.toml")
_PASSES = Path("bench/suite_passes.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A suite that `make NAME` runs whole."""

    name: str
    """Target of the Makefile."""
    about: str
    """What it shows, in a few words."""
    short: str
    """File of tests with its short form."""
    in_ci: bool = False
    """Whether it needs nothing but packages of pip, and less than the limit of a rotation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A whole run that passed."""

    date: str
    """Day, in UTC."""
    commit: str
    """With "-dirty" if the tree had changes."""
    seconds: float | None = None
    """How long it took; None: not recorded."""


def suites(root: Path) -> list[Suite]:
    """Of bench/suites.toml, in its order."""
    found = tomllib.loads((root / _SUITES).read_text(encoding="utf-8"))
    return [Suite(name=name, **about) for name, about in found.items()]


def last_passes(root: Path) -> dict[str, Pass]:
    """By suite; those that never passed are missing."""
    file = root / _PASSES
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name: Pass(**about) for name, about in found.items()}


def record_pass(root: Path, name: str, seconds: float, about: Mapping[str, object]) -> Pass:
    """Note that a suite has passed whole.

    Args:
        root: of the tree.
        name: of the suite.
        seconds: how long it took.
        about: `provenance` from before the run: a suite writes its result into the tree.
    """
    done = Pass(date=str(about["date"]), commit=str(about["commit"]), seconds=round(seconds))
    passes = {**last_passes(root), name: done}
    lines = {each: asdict(passes[each]) for each in sorted(passes)}
    (root / _PASSES).write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    return done


def next_in_rotation(suites: Iterable[Suite], passes: Mapping[str, Pass]) -> Suite:
    """Of those in CI, the one whose last pass is the longest ago; never comes first."""
    chosen = [suite for suite in suites if suite.in_ci]
    return min(chosen, key=lambda suite: passes[suite.name].date if suite.name in passes else "")
