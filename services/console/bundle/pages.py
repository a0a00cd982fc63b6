"""The pages as classic scripts: a browser takes no modules and no requests from a plain folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from posixpath import join, normpath
from typing import Any

_IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const|let) )", re.MULTILINE)
_EXPORTED = re.compile(
    r"^export (?:async function|function|class|const|let) ([A-Za-z_$][\w$]*)", re.MULTILINE
)
_ENTRY = "app.js"
_ENTRY_TAG = '<script type="module" src="static/app.js"></script>'
_TAGS = (
    '<script src="data.js" defer></script>\n  <script src="static/app.bundle.js" defer></script>'
)
_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'self\' file:; '
    "img-src 'self' file: data:; base-uri 'none'; form-action 'none'\">"
)


def write_pages(static: Path, out: Path, answers: dict[str, Any]) -> None:
    """Write index.html, data.js and static/ into `out`, from the pages in `static`.

    Raises:
        ValueError: a page is not of the form that can be joined.
    """
    index = (static / "index.html").read_text(encoding="utf-8")
    if index.count(_ENTRY_TAG) != 1:
        raise ValueError(f"index.html lacks {_ENTRY_TAG}")
    kept = shutil.ignore_patterns("index.html", "*.js", "*.py")
    shutil.copytree(static, out / "static", ignore=kept, dirs_exist_ok=True)
    for script in static.glob("vendor/**/*.js"):
        shutil.copyfile(script, out / "static" / script.relative_to(static))
    (out / "static" / "app.bundle.js").write_text(_joined(static), encoding="utf-8")
    text = json.dumps(answers, separators=(",", ":"))
    (out / "data.js").write_text(f"globalThis.SEAMFLOW_BUNDLE = {text};\n", encoding="utf-8")
    index = index.replace(_ENTRY_TAG, _TAGS).replace("<head>", f"<head>\n  {_POLICY}", 1)
    (out / "index.html").write_text(index, encoding="utf-8")


def _joined(static: Path) -> str:
    """All modules that the entry needs, each as a function that returns what it exports."""
    graph, sources = dict[str, set[str]](), dict[str, str]()
    waiting = [_ENTRY]
    while waiting:
        name = waiting.pop()
        if name in sources:
            continue
        sources[name] = (static / name).read_text(encoding="utf-8")
        graph[name] = {_place(name, match[2]) for match in _IMPORT.finditer(sources[name])}
        waiting += graph[name]
    order = TopologicalSorter(graph).static_order()
    modules = (_module(name, sources[name]) for name in order)
    return "\n".join(('"use strict";', "const modules = {};", *modules, ""))


def _place(name: str, imported: str) -> str:
    return normpath(join(name, "..", imported))


def _module(name: str, source: str) -> str:
    body = "\n".join(_lines(name, source))
    return f"modules[{json.dumps(name)}] = (() => {{\n{body}\n}})();"


def _lines(name: str, source: str) -> Iterator[str]:
    for match in _IMPORT.finditer(source):
        names = match[1].replace(" as ", ": ").strip()
        yield f"const {{ {names} }} = modules[{json.dumps(_place(name, match[2]))}];"
    body = _IMPORT.sub("", source)
    exported = ", ".join(_EXPORTED.findall(body))
    body = _EXPORT.sub("", body)
    if re.search(r"^(import|export)\b", body, re.MULTILINE):
        raise ValueError(f"{name} imports or exports in another form than the other pages")
    yield body
    yield f"return {{ {exported} }};"
