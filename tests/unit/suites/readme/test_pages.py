"""Every command block of the pages is listed: with how it is run, or why it is not."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from tests.suites.readme.pages import (
    ROOT,
    Block,
    Listed,
    commands_of,
    fence,
    listed,
    mistakes,
    pages,
)

PAGE = """# A page

```
seamflow one   # comment
```

## First

```console
$ seamflow two
output
```

```toml
[launcher]
```

## Second

```
seamflow three
```
"""


def test_every_block_of_the_pages_is_listed() -> None:
    """None is left out, and no row is left over."""
    assert mistakes(listed()[0], list(pages())) == []


def test_a_block_that_nobody_has_listed_is_a_mistake() -> None:
    """Control: with one row less, the block is named; a stale row or replacement is, too."""
    rows, _ = listed()
    (missing,) = mistakes([row for row in rows if "init --model" not in row.starts], list(pages()))
    assert missing.startswith("docs/training.md: the block that begins 'seamflow init --model")
    stale = replace(rows[0], page="README.md", starts="seamflow never")
    assert any("0 blocks begin" in line for line in mistakes([*rows, stale], list(pages())))
    wrong = [replace(rows[1], replace=(("no such part", ""),)), *rows[2:], rows[0]]
    assert any("the page does not say it" in line for line in mistakes(wrong, list(pages())))


@pytest.mark.parametrize("page", ["README.md", "docs/page.md"])
def test_command_blocks_are_those_without_a_language_or_of_a_shell(page: str) -> None:
    """Settings and programs are none; of a page in docs/ only the first section counts."""
    text = PAGE if page == "README.md" else "\n## ".join(PAGE.split("\n## ")[:2])
    found = commands_of(iter([(page, text)]))
    expected = [("", "seamflow one   # comment\n"), ("console", "$ seamflow two\noutput\n")]
    expected += [("", "seamflow three\n")] * (page == "README.md")
    assert found == [Block(page, language, text) for language, text in expected]


def test_what_is_run_has_a_home_and_its_files() -> None:
    """Each row is skipped for a reason, or run; the files of its folder are in the pages."""
    for row in listed()[0]:
        assert bool(row.skip) != bool(row.home)
        assert all(fence(named) for named in row.files.values())


def test_each_extra_is_listed() -> None:
    """With what it starts, or why it starts nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    _, extras = listed()
    assert set(extras) == set(project["optional-dependencies"])
    assert all(extras.values())


def test_a_row_belongs_to_one_page() -> None:
    """Blocks of two pages may begin alike."""
    row = Listed(page="README.md", starts="make", files={})
    assert row.is_of(Block("README.md", "", "make up\n"))
    assert not row.is_of(Block("docs/x.md", "", "make up\n"))
