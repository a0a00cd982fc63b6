"""How the folder of a weight version is called, for whoever writes, shares or caches it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["folder_name", "versions_in"]

_PREFIX = "weight_v"


def folder_name(weight_version: int) -> str:
    """`weight_v000012`."""
    return f"{_PREFIX}{weight_version:06d}"


def versions_in(folder: Path, suffix: str = "") -> list[int]:
    """Versions that have a folder of that name and `suffix` in `folder`, in order."""
    names = (path.name for path in folder.glob(f"{_PREFIX}*{suffix}"))
    numbers = (name.removeprefix(_PREFIX).removesuffix(suffix) for name in names)
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())
