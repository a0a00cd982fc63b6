"""How large images are."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable

_UNITS = {"B": 1e-9, "kB": 1e-6, "MB": 1e-3, "GB": 1.0, "TB": 1e3}


def gigabytes(images: Iterable[str]) -> float:
    """Sum of their sizes, in units of 10^9 bytes; layers that two of them share count twice."""
    return (
        sum(int(_docker("image", "inspect", "--format", "{{.Size}}", each)) for each in images)
        / 1e9
    )


def gigabytes_of_engine() -> float:
    """All images of the engine, in units of 10^9 bytes, each layer once, as Docker rounds it."""
    lines = _docker("system", "df", "--format", "{{.Type}}\t{{.Size}}").splitlines()
    return parsed(dict(line.split("\t") for line in lines)["Images"])


def parsed(size: str) -> float:
    """10^9 bytes of a size as Docker prints it, such as "812.4MB"."""
    match = re.fullmatch(r"([\d.]+)([kMGT]?B)", size)
    if match is None:
        raise ValueError(f"{size!r} is no size: docker system df prints a number and a unit")
    return float(match[1]) * _UNITS[match[2]]


def _docker(*arguments: str) -> str:
    command = ["docker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
