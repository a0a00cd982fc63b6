"""The engine processes of a run: found, asked and killed from outside."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from random import Random
from typing import Any

import psutil

from tests.lib.sglang.checksums import published_checksums
from tests.lib.sglang.quickstart import Quickstart

_LOOK_SECONDS = 0.05
_NODE_VARIABLE = "SEAMFLOW_ROLLOUT_SERVER_SERVER_ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """SGLang as one rollout server started it."""

    main: psutil.Process
    url: str

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer of one call; raises `OSError` if there is none, or half of one."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.load(answer)
        except (HTTPException, ValueError) as error:
            raise ConnectionError(f"{request.full_url}: cut off: {error!r}") from error

    def kill(self, random: Random) -> str:
        """SIGKILL the scheduler child, or all of it; what was killed."""
        children = self.main.children(recursive=True)
        schedulers = [child for child in children if "scheduler" in _command(child)]
        victims, name = random.choice(
            [(schedulers, "scheduler"), ([self.main, *children], "whole engine")]
        )
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        return name


def engine_of(node: str) -> EngineProcess | None:
    """The engine of the rollout server on `node`, if it has started one."""
    for server in psutil.Process(os.getpid()).children(recursive=True):
        if "rollout.server" in _command(server) and _node(server) == node:
            for child in server.children(recursive=True):
                command = _command(child).split()
                # The process between them, which ends SGLang with its server, has both too.
                if command[1:3] == ["-m", "sglang.launch_server"]:
                    port = command[command.index("--port") + 1]
                    return EngineProcess(main=child, url=f"http://127.0.0.1:{port}")
    return None


@dataclass(slots=True)
class ChecksumWatch:
    """Compares each engine's tensors with the published ones, after each of its updates."""

    run: Quickstart
    checked: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Versions compared, by node."""
    wrong: list[str] = field(default_factory=list)
    """Tensors that differ."""
    _engines: dict[str, EngineProcess] = field(default_factory=dict)
    _compared: set[tuple[EngineProcess, str]] = field(default_factory=set)

    @asynccontextmanager
    async def watching(self, nodes: Iterable[str]) -> AsyncIterator[None]:
        """Look again and again; raises at the end what kept a node from being looked at."""
        watchers = [asyncio.create_task(self._watch(node)) for node in nodes]
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()
            ends = await asyncio.gather(*watchers, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _watch(self, node: str) -> None:
        while True:
            await asyncio.to_thread(self._look, node)
            await asyncio.sleep(_LOOK_SECONDS)

    def _look(self, node: str) -> None:
        try:
            told = self._told(node)
        except (OSError, psutil.Error):
            return  # the engine ended meanwhile
        if told is not None:
            self._compare(node, *told)

    def _told(self, node: str) -> tuple[int, Mapping[str, str]] | None:
        """A version that this engine was not asked about yet, with the checksums it has of it."""
        engine = self._engines.get(node) or engine_of(node)
        if engine is None or not engine.main.is_running():
            self._engines.pop(node, None)
            return None
        self._engines[node] = engine
        version = engine.ask("/model_info")["weight_version"]
        if not version.isdecimal() or (engine, version) in self._compared:
            return None
        (rank,) = engine.ask("/weights_checker", {"action": "checksum"})["ranks"]
        if engine.ask("/model_info")["weight_version"] != version:
            return None  # the answer may be of either
        self._compared.add((engine, version))
        return int(version), rank["checksums"]

    def _compare(self, node: str, version: int, checksums: Mapping[str, str]) -> None:
        published = published_checksums(self.run.weights(version))
        self.wrong += [
            f"{node}, version {version}: {name}"
            for name in published.keys() | checksums.keys()
            if published.get(name) != checksums.get(name)
        ]
        self.checked[node].add(version)


def loads_of(run: Quickstart, node: str) -> Counter[int]:
    """How often the engine of a node loaded each version."""
    lines = (run.folder / "logs" / f"rollout_server-{node}.log").read_text().splitlines()
    logged = [json.loads(line) for line in lines if '"weights_loaded"' in line]
    return Counter(line["weight_version"] for line in logged if line["msg"] == "weights_loaded")


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _node(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(_NODE_VARIABLE)
    except psutil.Error:
        return None
