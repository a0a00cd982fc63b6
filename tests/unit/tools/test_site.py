"""The pages of the site link to what is in the site."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.site import llms_text, staged

ROOT = Path(__file__).parents[3]
LINK = re.compile(r"\]\((?P<target>[^)\s#]+)")


def broken(files: Mapping[str, bytes]) -> Iterator[str]:
    """Links of pages to what the site does not have."""
    for name, content in files.items():
        if name.endswith(".md"):
            for link in LINK.finditer(content.decode()):
                target = os.path.normpath(Path(name).parent / link["target"])
                if "://" not in link["target"] and target not in files:
                    yield f"{name}: {link['target']}"


def test_each_link_holds_inside_of_the_site() -> None:
    files = staged(ROOT)
    assert len([name for name in files if name.endswith(".md")]) > 40
    assert list(broken(files)) == []


def test_control_a_page_that_is_left_out_is_missed() -> None:
    files = dict(staged(ROOT))
    del files["agents.md"]
    assert any("agents.md" in each for each in broken(files))


def test_each_page_is_in_llms_txt_with_a_sentence() -> None:
    lines = [line for line in llms_text(ROOT).splitlines() if line.startswith("- ")]
    assert len(lines) == len([name for name in staged(ROOT) if name.endswith(".md")])
    assert all(len(line.partition("): ")[2]) > 10 for line in lines), lines
