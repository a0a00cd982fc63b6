"""`python -m tools.size`: how large the project is. A test keeps these figures within bounds.

Lines are all lines of Python files, without generated code. Settings are the distinct rows of
docs/configuration.md, words those of every page, targets those of the Makefile with a description.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = (
    "services",
    "rollout",
    "sdk",
    "trainer",
    "scheduler",
    "trajectory_manager",
    "adapters",
    "tools",
)
"""Folders of the product."""


def sizes(root: Path) -> dict[str, int]:
    files = _tracked(root)
    python = [name for name in files if name.endswith(".py") and "_pb2" not in name]
    product = [name for name in python if name.split("/")[0] in ROOMS]
    settings = re.findall(r"^\| `.*$", _text(root, "docs/configuration.md"), flags=re.MULTILINE)
    targets = re.findall(r"^[a-z-]+:.*##", _text(root, "Makefile"), flags=re.MULTILINE)
    pages = [name for name in files if name.endswith(".md")]
    return {
        "product_lines": sum(_lines(root, name) for name in product),
        "product_files": len(product),
        **{
            f"{room}_lines": sum(_lines(root, n) for n in product if _is_in(n, room))
            for room in ROOMS
        },
        "test_lines": sum(_lines(root, name) for name in python if _is_in(name, "tests")),
        "settings": len(set(settings)),
        "make_targets": len(targets),
        "words_of_pages": sum(len(_text(root, name).split()) for name in pages),
    }


def main() -> None:
    print(_table(sizes(ROOT)))


def _table(figures: Mapping[str, int]) -> str:
    return "\n".join(f"{name:24} {value:>8,}" for name, value in figures.items())


def _tracked(root: Path) -> list[str]:
    listed = subprocess.check_output(["git", "ls-files"], cwd=root, text=True)  # noqa: S607 -- of the system
    return [name for name in listed.splitlines() if (root / name).is_file()]


def _is_in(name: str, folder: str) -> bool:
    return name.startswith(f"{folder}/")


def _lines(root: Path, name: str) -> int:
    return _text(root, name).count("\n")


def _text(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
