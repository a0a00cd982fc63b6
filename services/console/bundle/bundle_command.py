"""`seamflow console bundle RUN --rollouts ID,ID --out DIR`."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from posixpath import join, normpath
from typing import Any

import grpc.aio
from seamflow.errors import SeamflowError, decode
from seamflow.inspect.endpoints import UsageError
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import ExitCode
from services.console.bundle.recorded_answers import recorded_answers
from services.console.bundle.redaction import Redaction, known_secrets
from services.console.sources.run_store import RunStore, RunStores
from services.console.sources.shown_run import folder_run

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

_MOST = 1000


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


def bundle(arguments: Sequence[str], static: Path) -> int:
    """Write the folder; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        asyncio.run(_write(given, static))
    except (UsageError, ValueError, OSError) as error:
        sys.stderr.write(f"console bundle: {error}\n")
        return ExitCode.USAGE
    except grpc.aio.AioRpcError as error:
        sys.stderr.write(f"console bundle: {decode(error)}\n")
        return ExitCode.UNAVAILABLE
    except SeamflowError as error:
        sys.stderr.write(f"console bundle: {error}\n")
        return ExitCode.UNAVAILABLE
    return ExitCode.CLEAN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seamflow console bundle",
        description="Write chosen rollouts as pages that open without a console, from a folder or "
        "any web server. What has the form of a credential is removed; look before you share.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--rollouts", help="their names, separated by commas")
    chosen.add_argument("--step", type=int, help="those that this step trained on")
    chosen.add_argument("--newest", type=int, metavar="N", help="the newest N")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    return parser


async def _write(given: argparse.Namespace, static: Path) -> None:
    if given.out.exists() and any(given.out.iterdir()):
        raise UsageError(f"--out {str(given.out)!r} is not empty: name a new folder")
    run, stores = folder_run(given.run), RunStores()
    redaction = Redaction(known_secrets(run.folder))
    try:
        store = await stores.of(run)
        names = await _names(given, store)
        answers = await recorded_answers(run, store, names, redaction)
    finally:
        await stores.close()
        if run.endpoints is not None:
            await run.endpoints.close()
    given.out.mkdir(parents=True, exist_ok=True)
    write_pages(static, given.out, answers)
    removed = f"; {redaction.num_removed} credentials removed" if redaction.num_removed else ""
    print(f"{len(names)} rollouts in {given.out}{removed}: open {given.out / 'index.html'}")


async def _names(given: argparse.Namespace, store: RunStore) -> list[str]:
    """Of the chosen rollouts, which must exist."""
    if given.rollouts:
        names = [name.strip() for name in given.rollouts.split(",") if name.strip()]
        search = pb.SearchRolloutsRequest(rollout_ids=names, page_size=_MOST)
    else:
        search = pb.SearchRolloutsRequest(step=given.step or 0)
        search.page_size = min(max(given.newest or _MOST, 1), _MOST)
        names = []
    found = [each.rollout_id for each in (await store.found(search)).rollouts]
    if missing := set(names) - set(found):
        raise UsageError(f"--rollouts: the run has no {sorted(missing)[0]!r}")
    if not found:
        raise UsageError("no rollout is chosen: the console lists those of each step")
    return found
