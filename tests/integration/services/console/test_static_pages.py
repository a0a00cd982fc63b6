"""The pages as the console serves them: complete, and without a way for text to become markup."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import join, normpath

import pytest

from services.console.app import STATIC
from tests.lib.console.support import World, world

_NAMED = re.compile(r'(?:src|href)="(static/[^"]+)"|from "(\.[^"]+)"')
_TYPES = {".js": "javascript", ".css": "text/css", ".svg": "image/svg+xml", "": "text/html"}
_PARSES = re.compile(
    r"(?:inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    r"|createContextualFragment|srcdoc|setTimeout\(\s*[\"'`]"
)
"""Ways to make markup or code of text."""
MODULES = sorted(file for file in STATIC.rglob("*.js") if "vendor" not in file.parts)


async def test_every_file_that_a_page_names_is_served(redis_url: str) -> None:
    """With its type: a browser takes no module of another."""
    async with world(redis_url) as shown:
        waiting, seen = ["/"], set[str]()
        while waiting:
            path = waiting.pop()
            if path not in seen:
                seen.add(path)
                waiting += await _named(shown, path)
    served = {STATIC / path.removeprefix("/static/") for path in seen}
    assert served >= set(MODULES), "a module that no page needs"


async def _named(shown: World, path: str) -> list[str]:
    async with shown.http.get(f"{shown.url}{path}") as response:
        assert response.status == 200, path
        assert response.content_type.endswith(_TYPES[Path(path).suffix]), path
        text = await response.text()
    if "/vendor/" in path:
        return []
    return [
        f"/{named}" if named else normpath(join(path, "..", imported))
        for named, imported in _NAMED.findall(text)
    ]


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(STATIC)))
def test_no_module_parses_text(file: Path) -> None:
    """What a model wrote stays text."""
    assert not _PARSES.findall(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("line", ["e.innerHTML = text", 'setTimeout("f()")', "eval(text)"])
def test_a_module_that_parses_text_is_found(line: str) -> None:
    """The control."""
    assert _PARSES.findall(line)


def test_index_has_no_script_and_no_style_of_its_own() -> None:
    """The page's policy forbids both."""
    index = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"<script>|<style|\son\w+=|style=", index)


def test_what_is_vendored_has_its_licence() -> None:
    """Beside its files."""
    for folder in (STATIC / "vendor").iterdir():
        assert "MIT License" in (folder / "LICENSE").read_text(encoding="utf-8"), folder
