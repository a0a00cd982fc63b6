"""A site-packages in which some of the packages of this environment are, and no others.

It is made of links, and Python finds it by PYTHONPATH with -S, so it costs no installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def names_of(wheel_site: Path, *extras: str) -> set[str]:
    """Distributions that the wheel in `wheel_site` requires with these extras, and those they do.

    Those that are not installed here are left out.
    """
    (ours,) = metadata.distributions(name="seamflow", path=[str(wheel_site)])
    found: set[tuple[str, str]] = set()
    _collect(ours, {"", *extras}, found)
    return {name for name, _ in found if name != "seamflow"}


def _collect(
    distribution: metadata.Distribution, extras: Iterable[str], found: set[tuple[str, str]]
) -> None:
    for requirement in map(Requirement, distribution.requires or ()):
        if not any(_applies(requirement, extra) for extra in extras):
            continue
        name = canonicalize_name(requirement.name)
        new = {(name, extra) for extra in ("", *requirement.extras)} - found
        found |= new
        other = distribution if name == "seamflow" else _installed().get(name)
        if new and other is not None:
            _collect(other, {extra for _, extra in new}, found)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


@cache
def _installed() -> Mapping[str, metadata.Distribution]:
    found = {canonicalize_name(each.name): each for each in metadata.distributions()}
    return {name: each for name, each in found.items() if name != "seamflow"}


@cache
def _owners() -> Mapping[str, set[str]]:
    """Names of the distributions that have a file or folder at the top of site-packages."""
    owners = defaultdict[str, set[str]](set)
    for name, distribution in _installed().items():
        for parts in _files(distribution):
            owners[parts[0]].add(name)
    return owners


def _files(distribution: metadata.Distribution) -> Iterator[tuple[str, ...]]:
    for file in distribution.files or ():
        if file.parts[0] not in ("..", "__pycache__"):
            yield file.parts


def link_packages(folder: Path, names: Iterable[str]) -> None:
    """Make `folder`, with these distributions; of a folder that several share, only their parts."""
    folder.mkdir(parents=True)
    for distribution in (_installed()[name] for name in names if name in _installed()):
        for entry in {_linked(parts) for parts in _files(distribution)}:
            place = folder / entry
            place.parent.mkdir(exist_ok=True)
            if not place.is_symlink():
                place.symlink_to(Path(str(distribution.locate_file(entry))))


def _linked(parts: tuple[str, ...]) -> str:
    depth = 1 if len(_owners()[parts[0]]) == 1 else 2
    return "/".join(parts[:depth])


def run_with(sites: Iterable[Path], *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Python, which imports from `sites` and from its standard library only."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEAMFLOW_")}
    paths = os.pathsep.join(map(str, sites))
    environment = {**kept, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-S", "-P", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
