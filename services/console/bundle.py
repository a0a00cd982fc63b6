"""`seamflow console bundle RUN --rollouts ID,ID --out DIR`: pages that open without a console.

Credentials are taken out of what is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from posixpath import join, normpath
from typing import Any
from urllib.parse import quote, quote_plus

import grpc.aio
from seamflow.errors import SeamflowError, decode
from seamflow.inspect.endpoints import UsageError
from seamflow.inspect.snapshot import Snapshot
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import ExitCode
from services.console.sources.run_store import RunStore, RunStores
from services.console.sources.shown_runs import ShownRun, folder_run
from services.console.views.excerpts import with_excerpts
from services.console.views.nodes import ended_history
from services.console.views.overview import overview, run_row, step_curves
from services.console.views.rows import rollout_row
from services.console.views.step_detail import step_detail
from services.console.views.token_window import MAX_TOKENS, token_window
from services.console.views.transcript import transcript

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

Values = dict[str, Any]

_REMOVED = "[removed]"
_HIDDEN = "█"
_SHORTEST = 8
_FORMS = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"\bsk-[A-Za-z0-9_-]{16,}",
    r"\bgh[pousr]_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\bhf_[A-Za-z0-9]{20,}",
    r"\bxox[a-z]-[A-Za-z0-9-]{10,}",
    r"\bA(?:KIA|SIA)[0-9A-Z]{16}\b",
    r"\bAIza[A-Za-z0-9_-]{30,}",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+",
    r"(?i:\bbearer\s+)[A-Za-z0-9._~+/=-]{16,}",
    r"(?<=://)[^\s/:@]+:[^\s/@]+(?=@)",
    r"(?i:\b(?:password|passwd|secret|api[_-]?key|access[_-]?key|auth[_-]?token|credential)s?"
    r"[\"']?\s*[:=]\s*[\"']?)[^\s\"',;]{6,}",
)
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_FILES = ("credential_secret", "console_token", "hosts/agent_token")


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


async def recorded_answers(
    run: ShownRun, store: RunStore, rollout_ids: Sequence[str], redaction: Redaction
) -> Values:
    """The run's curves and nodes, and the chosen rollouts with their tokens and steps."""
    run.steps.read()
    own = _path("runs", run.run_id)
    rows = await _rows(store, rollout_ids)
    found: Values = {
        "runs": {"runs": [_without_folder(run_row(run, Snapshot()))]},
        f"{own}/overview": overview(run, Snapshot()),
        f"{own}/steps": step_curves(run, Snapshot(), run.steps.names, 0),
        f"{own}/rollouts": {"rows": rows, "next": None, "searched": len(rows), "total": len(rows)},
        f"{own}/nodes": await ended_history(store, run),
    }
    for step in sorted({row["step"] for row in rows if row["step"]}):
        detail = await step_detail(store, run.steps, step)
        found[f"{own}/steps/{step}"] = _chosen(detail, set(rollout_ids))
    found = redaction.values(found)
    for rollout_id in rollout_ids:
        async for path, answer in _rollout(own, store, rollout_id, redaction):
            found[path] = answer
    return found


def _path(*parts: str) -> str:
    """As encodeURIComponent writes them."""
    return "/".join(quote(part, safe="!'()*") for part in parts)


def _without_folder(row: Values) -> Values:
    return {**row, "live": False, "model": Path(row["model"]).name}


def _chosen(detail: Values, rollout_ids: set[str]) -> Values:
    """Of a step the groups that have a chosen rollout; their others are rows without a text."""
    groups = [
        group
        for group in detail["groups"]
        if any(row["rollout_id"] in rollout_ids for row in group["samples"])
    ]
    return {**detail, "groups": groups}


async def _rows(store: RunStore, rollout_ids: Sequence[str]) -> list[Values]:
    search = pb.SearchRolloutsRequest(rollout_ids=rollout_ids, page_size=1000)
    rows = [rollout_row(each) for each in (await store.found(search)).rollouts]
    return await with_excerpts(store, rows)


async def _rollout(
    own: str, store: RunStore, rollout_id: str, redaction: Redaction
) -> AsyncIterator[tuple[str, Values]]:
    path = f"{own}/{_path('rollouts', rollout_id)}"
    whole = await transcript(store, rollout_id)
    yield path, redaction.values(whole)
    for turn in whole["turns"]:
        tokens = await _tokens(store, rollout_id, turn["turn_id"])
        yield f"{path}/tokens?turn={quote_plus(turn['turn_id'])}", redaction.window(tokens)


async def _tokens(store: RunStore, rollout_id: str, turn_id: str) -> Values:
    """All tokens of a turn's sequence."""
    whole = await token_window(store, rollout_id, turn_id, 0, MAX_TOKENS)
    while len(whole["ids"]) < whole["total"]:
        start = len(whole["ids"])
        part = await token_window(store, rollout_id, turn_id, start, MAX_TOKENS)
        if not part["ids"]:
            break
        for name, values in part.items():
            if isinstance(values, list | str):
                whole[name] += values
    return whole


def known_secrets(folder: Path | None) -> set[str]:
    """Secrets of the run in `folder`, and those among this process's variables."""
    found = {value for name, value in os.environ.items() if _NAMES.search(name)}
    for name in _FILES if folder is not None else ():
        file = Path(folder or "") / name
        if file.is_file():
            found.add(file.read_text(encoding="utf-8", errors="replace").strip())
    if folder is not None and (folder / "redis.conf").is_file():
        found.update((folder / "redis.conf").read_text(encoding="utf-8").split()[1:2])
    return {value for value in found if len(value) >= _SHORTEST}


class Redaction:
    """Replaces known secrets, and what has the form of a credential."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        forms = [re.escape(value) for value in sorted(known, key=len, reverse=True)]
        self._pattern = re.compile("|".join((*forms, *_FORMS)), re.DOTALL)
        self.num_removed = 0
        """Places where something was removed."""

    def values(self, values: Any) -> Any:
        """JSON values without them, in texts and in names."""
        if isinstance(values, str):
            text, number = self._pattern.subn(_REMOVED, values)
            self.num_removed += number
            return text
        if isinstance(values, Mapping):
            return {self.values(name): self.values(value) for name, value in values.items()}
        return [self.values(each) for each in values] if isinstance(values, list) else values

    def window(self, window: Mapping[str, Any]) -> dict[str, Any]:
        """Tokens whose texts, joined, have none; their ids would tell them, and are -1."""
        texts, ids = list(window["texts"]), list(window["ids"])
        for match in self._pattern.finditer("".join(texts)):
            self.num_removed += 1
            for index in _overlapping(window["texts"], match.start(), match.end()):
                texts[index], ids[index] = _HIDDEN, -1
        return {**window, "texts": texts, "ids": ids}


def _overlapping(texts: Iterable[str], start: int, end: int) -> list[int]:
    found, at = list[int](), 0
    for index, text in enumerate(texts):
        if at < end and at + len(text) > start:
            found.append(index)
        at += len(text)
    return found
