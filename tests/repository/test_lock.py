"""deploy/requirements.lock: a version of every package, within the ranges of pyproject.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: Mapping[str, Sequence[str]] = PROJECT["optional-dependencies"]


def lines() -> list[str]:
    """Those that name a package, without their comments."""
    text = (ROOT / "deploy" / "requirements.lock").read_text(encoding="utf-8")
    found = [line.partition("  #")[0].strip() for line in text.splitlines()]
    return [line for line in found if line and not line.startswith("#")]


def locked(given: Sequence[str]) -> dict[str, list[str]]:
    """Versions of each package; several differ in the systems that they are for."""
    found: dict[str, list[str]] = {}
    for requirement in map(Requirement, given):
        (version,) = requirement.specifier
        assert version.operator == "=="
        found.setdefault(canonicalize_name(requirement.name), []).append(version.version)
    return found


def outside(versions: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Requirements of ours that the lock does not meet."""
    for text in (*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)):
        requirement = Requirement(text)
        known = versions.get(canonicalize_name(requirement.name), ())
        met = known and all(map(requirement.specifier.contains, known))
        if requirement.name != "seamflow" and not met:
            yield text


def test_the_lock_meets_every_requirement() -> None:
    """Of every extra; control: a version that was raised since, and a new package."""
    versions = locked(lines())
    assert list(outside(versions)) == []
    old = versions | {"redis": ["7.0.0"]}
    del old["structlog"]
    assert {Requirement(each).name for each in outside(old)} == {"redis", "structlog"}


def test_the_lock_names_no_place() -> None:
    """Packages come from the index of whoever installs; builds of torch differ by system."""
    for line in lines():
        assert not any(mark in line for mark in ("://", "--", " @ ")), line
    assert locked(lines())["torch"] == ["2.13.0"]
