"""The command blocks of the pages, and how each is listed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
_LIST = Path(__file__).with_name("listed.toml")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELLS = frozenset(("", "bash", "console", "sh", "shell"))
"""Languages of fences that hold commands."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fence of a page."""

    page: str
    """Relative to the repository."""
    language: str
    """As the fence says; empty: none."""
    text: str
    """Between the fence's lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """How a block is run, or why not; the fields are those of listed.toml."""

    page: str
    starts: str = ""
    command: str = ""
    skip: str = ""
    home: str = ""
    environment: tuple[str, ...] = ()
    files: Mapping[str, str]
    setup: str = ""
    replace: Sequence[tuple[str, str]] = ()
    makes: tuple[str, ...] = ()

    def is_of(self, block: Block) -> bool:
        """Whether it says how this block is run."""
        is_begun = bool(self.starts) and block.text.startswith(self.starts)
        return self.page == block.page and is_begun


def pages(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """README.md whole, and the first section of each page in docs/ with what is before it."""
    yield "README.md", (root / "README.md").read_text(encoding="utf-8")
    for file in sorted((root / "docs").rglob("*.md")):
        text = file.read_text(encoding="utf-8")
        yield str(file.relative_to(root)), "\n## ".join(text.split("\n## ")[:2])


def blocks(texts: Iterator[tuple[str, str]]) -> list[Block]:
    """All fences of the pages."""
    return [
        Block(page, language, text)
        for page, content in texts
        for language, text in _FENCE.findall(content)
    ]


def commands_of(texts: Iterator[tuple[str, str]]) -> list[Block]:
    """The fences that hold commands, or have no language."""
    return [block for block in blocks(texts) if block.language in _SHELLS]


def fence(named: str, root: Path = ROOT) -> str:
    """The block that "page: beginning" names, of any part of the page."""
    page, _, start = named.partition(": ")
    text = (root / page).read_text(encoding="utf-8")
    found = [text for _, text in _FENCE.findall(text) if text.startswith(start)]
    assert len(found) >= 1, f"{named}: there is no such block"
    return str(found[0])


def listed(file: Path = _LIST) -> tuple[list[Listed], Mapping[str, str | list[str]]]:
    """The blocks in their order, and the commands of each extra."""
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    return [_row(each) for each in found["block"]], found["extra"]


def _row(given: Mapping[str, Any]) -> Listed:
    values: dict[str, Any] = {"files": {}, **given}
    for name, value in given.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return Listed(**values)


def mistakes(rows: Sequence[Listed], texts: Sequence[tuple[str, str]]) -> list[str]:
    """Blocks that are not listed, rows without a block, and parts that no page says."""
    found = commands_of(iter(texts))
    lines = [
        f"{block.page}: the block that begins {block.text.splitlines()[0]!r} is not in listed.toml"
        for block in found
        if not any(row.is_of(block) for row in rows)
    ]
    whole = dict(texts)
    for row in rows:
        said = [block.text for block in found if row.is_of(block)]
        if row.command and row.command in whole.get(row.page, ""):
            said.append(row.command)
        if len(said) != 1:
            lines.append(f"{row.page}: {len(said)} blocks begin {row.starts or row.command!r}")
        lines += [
            f"{row.page}: {old!r} is to be replaced, and the page does not say it"
            for old, _ in row.replace
            if not any(old in text for text in said)
        ]
    return lines
