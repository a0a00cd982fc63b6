"""`python -m tools.site`: write the pages to runs/site, and build the site with `seamflow[site]`.

Exits with 1 where a link or an anchor of a page leads nowhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
_NAMES = {"README.md": "index.md", "deploy/README.md": "deploy.md"}
_ASSETS = (".png", ".json", ".svg")
_SOURCE = "source"

ROOT = Path(__file__).parents[1]
_OUT = ROOT / "runs" / "site"
_QUIET = {"NO_MKDOCS_2_WARNING": "1"}
_CONFIG = ROOT / "docs" / "mkdocs.yml"


def staged(root: Path) -> Mapping[str, bytes]:
    """Content of the site's files by their path in it."""
    pages = _pages(root)
    found: dict[str, bytes] = {}
    for path, name in pages.items():
        page = _Page(root, path, name, pages)
        found[name] = page.text().encode()
        found.update(page.copies)
    return found


def llms_text(root: Path) -> str:
    """llms.txt: title and first sentence of each page, for programs that read the site."""
    lines = [_about(root / path, name) for path, name in _pages(root).items()]
    return (
        "# seamflow\n\n> Reinforcement-learning post-training of LLM agents, as services.\n\n"
        + ("## Pages\n\n" + "".join(lines))
    )


def _pages(root: Path) -> Mapping[str, str]:
    """Name in the site by path in the repository."""
    docs = [file.relative_to(root) for file in sorted((root / "docs").rglob("*.md"))]
    names = {str(path): str(path.relative_to("docs")) for path in docs}
    top = {path: _NAMES.get(path, path.lower()) for path in (*_TOP, "deploy/README.md")}
    return top | names


class _Page:
    def __init__(self, root: Path, path: str, name: str, pages: Mapping[str, str]) -> None:
        self._root, self._path, self._name, self._pages = root, path, name, pages
        self.copies: dict[str, bytes] = {}
        """Files that it links to, by their path in the site."""

    def text(self) -> str:
        return _LINK.sub(self._link, (self._root / self._path).read_text(encoding="utf-8"))

    def _link(self, link: re.Match[str]) -> str:
        target, mark, anchor = link["target"].partition("#")
        if not target or "://" in target:
            return link[0]
        path = os.path.relpath((self._root / self._path).parent / target, self._root)
        there = self._pages.get(path) or self._copied(path)
        if there is None:
            return link["text"]
        name = os.path.relpath(there, Path(self._name).parent)
        return f"[{link['text']}]({name}{mark}{anchor})"

    def _copied(self, path: str) -> str | None:
        """The copy of a file of the repository; None for a folder."""
        file = self._root / path
        if file.is_dir():
            return None
        name = f"{_SOURCE}/{path}" + ("" if file.suffix in _ASSETS else ".txt")
        self.copies[name] = file.read_bytes()
        return name


def _about(file: Path, name: str) -> str:
    title, first = _opening(file.read_text(encoding="utf-8"))
    return f"- [{title}]({name}): {first}\n"


def _opening(text: str) -> tuple[str, str]:
    """Title, and the first sentence below it."""
    title, _, rest = text.partition("# ")[2].partition("\n")
    paragraph = " ".join(rest.strip().partition("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].rstrip(".:")
    return title, _LINK.sub(lambda link: link["text"], sentence) + "."


def main() -> int:
    """Returns the exit code of MkDocs."""
    pages = _OUT / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    for path, content in staged(ROOT).items():
        target = pages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    (pages / "llms.txt").write_text(llms_text(ROOT), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(_CONFIG)]
    code = subprocess.run(command, env={**os.environ, **_QUIET}, check=False).returncode
    if code == 0:
        print(f"wrote {_OUT / 'html' / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
