"""Sender, weights service and two rollout servers as processes that are killed in mid-publish."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio
from seamflow.stubs import async_stub
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from tests.lib.redis_server import free_port
from tests.lib.weights.support import Trainer, describe
from tests.suites.publish_kills.publishing_sender import RUN, contents
from tests.suites.publish_kills.reading_engine import LOADED

_WAIT_SECONDS = 60.0
_ENGINE = "tests.suites.publish_kills.reading_engine:ReadingEngine"


@cache
def _digests(step: int) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in contents(step).items()}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Notes of a file; the last may have been cut by a kill."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wrong_loads(
    loads: Sequence[Mapping[str, Any]], published: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What engines loaded that is not whole, of two versions, damaged, or not yet committed."""
    steps = {line["version"]: line["step"] for line in published}
    commits: dict[int, float] = {}
    for line in published:
        if line["phase"] == "commit":
            commits.setdefault(line["version"], line["time"])
    wrong = []
    for load in loads:
        version = load["version"]
        if load["files"] != _digests(steps.get(version, 0)):
            wrong.append(f"version {version} has other files than its step")
        if load["time"] < commits.get(version, float("inf")):
            wrong.append(f"version {version} was loaded before its commit")
    return wrong


@dataclass
class Rig:
    """All processes, with their files in `folder`."""

    folder: Path
    redis_url: str
    port: int = field(default_factory=free_port)
    epoch: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def published(self) -> list[dict[str, Any]]:
        """What the sender has noted."""
        return _lines(self.folder / "progress")

    def loads(self, server: str) -> list[dict[str, Any]]:
        """What the engine of a rollout server has loaded."""
        return _lines(self.folder / f"{server}.loaded")

    def start(self, name: str) -> None:
        """Start "weights", "sender", or a rollout server: "shared", "stream", "unchecked"."""
        starting: dict[str, Callable[[], None]] = {
            "weights": self._start_weights,
            "sender": self._start_sender,
        }
        starting.get(name, lambda: self._start_server(name))()

    def _start_weights(self) -> None:
        self._run(
            *("weights", "services.weights", "--folder", str(self.folder / "published")),
            *("--redis-url", self.redis_url, "--port", str(self.port)),
            *("--keep-versions", "1000", "--admin-port", "-1"),
        )

    def _start_sender(self) -> None:
        self.epoch += 1
        first = max((line["step"] for line in self.published), default=1)
        arguments = (f"127.0.0.1:{self.port}", str(self.epoch), str(first))
        module = "tests.suites.publish_kills.publishing_sender"
        self._run("sender", module, *arguments, str(self.folder / "progress"))

    def _start_server(self, name: str) -> None:
        transport = "shard_stream" if name == "stream" else "shared_folder"
        variables = {
            LOADED: str(self.folder / f"{name}.loaded"),
            "SEAMFLOW_ROLLOUT_SERVER_WEIGHT_TRANSPORTS": json.dumps([transport]),
        }
        flags = ["--engine", _ENGINE, "--run-id", RUN, "--weights", f"127.0.0.1:{self.port}"]
        flags += ["--port", "0", "--admin-port", "-1", "--cache-folder", str(self.folder / name)]
        module = "tests.suites.publish_kills.unchecked_server"
        self._run(name, module if name == "unchecked" else "rollout.server", *flags, **variables)

    def _run(self, name: str, module: str, *arguments: str, **variables: str) -> None:
        python_path = ":".join(sys.path)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"} | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        """Kill all."""
        for name in list(self.processes):
            self.kill(name)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; all processes must be running meanwhile."""
        async with asyncio.timeout(_WAIT_SECONDS):
            while not condition():
                for name, process in self.processes.items():
                    assert process.poll() is None, f"{name} ended while waiting for {what}"
                await asyncio.sleep(0.01)

    async def until_all_load(self, above: int) -> None:
        """Wait until both servers have loaded a version above `above`."""
        for server in ("shared", "stream"):
            await self.until(
                lambda server=server: any(  # type: ignore[misc]
                    load["version"] > above for load in self.loads(server)
                ),
                f"a version above {above} in {server}",
            )

    async def run(self, kills: Sequence[str], seed: int) -> None:
        """Kill these processes, each in the middle of a publish, and have all recover."""
        draws = random.Random(seed)
        for name in ("weights", "shared", "stream", "sender"):
            self.start(name)
        await self.until_all_load(0)
        for name in kills:
            seen = len(self.published)
            await self.until(
                lambda seen=seen: any(  # type: ignore[misc]
                    "safetensors" in line["phase"] for line in self.published[seen:]
                ),
                "a file on its way",
            )
            await asyncio.sleep(draws.uniform(0.0, 0.25))
            self.kill(name)
            newest = max(line["version"] for line in self.published)
            self.start(name)
            await self.until_all_load(newest)

    def wrong(self) -> list[str]:
        """What the two servers loaded and should not have."""
        loads = {server: self.loads(server) for server in ("shared", "stream")}
        published = self.published  # read last: the sender goes on
        return [
            f"{server}: {what}"
            for server, loaded in loads.items()
            for what in wrong_loads(loaded, published)
        ]

    async def control(self) -> list[str]:
        """What a server that does not verify loads, after a byte of a committed file changed."""
        for name in ("sender", "shared", "stream"):
            self.kill(name)
        step = 1_000_000
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            stub = async_stub(WeightServiceStub, channel)
            trainer = Trainer(stub=stub, run_id=RUN, epoch=self.epoch + 1)
            version = (await trainer.begin(step)).weight_version
            await trainer.upload(trainer.parts(version, contents(step)))
            await trainer.commit(version, describe(contents(step)))
            damaged = Path(await trainer.folder(version)) / "model-1.safetensors"
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        self.start("unchecked")
        await self.until(lambda: bool(self.loads("unchecked")), "the damaged version")
        published = [{"version": version, "step": step, "phase": "commit", "time": 0.0}]
        return wrong_loads(self.loads("unchecked"), published)
