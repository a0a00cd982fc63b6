"""Suites and benches of bench/*.toml, and when each suite last passed: bench/suite_passes.json."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_SUITES, _BENCHES = Path("bench/suites.toml"), Path("bench/benches.toml")
_PASSES = Path("bench/suite_passes.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A suite or a bench, which `make suite` or `make bench` runs whole."""

    name: str
    about: str
    """What it shows, in a few words."""
    run: str
    """Lines of a shell, whose `python` is that of the project."""
    needs: tuple[str, ...] = ()
    """Files of the Makefile that are made first."""
    short: str = ""
    """File of tests with its short form; a bench has none."""
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
    return _read(root / _SUITES)


def benches(root: Path) -> list[Suite]:
    """Of bench/benches.toml, in its order."""
    return _read(root / _BENCHES)


def _read(file: Path) -> list[Suite]:
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    return [
        Suite(name=name, needs=tuple(about.pop("needs", ())), **about)
        for name, about in found.items()
    ]


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
