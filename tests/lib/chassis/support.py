"""A small service on the chassis, in this process or a separate one.

`StartRollout` and `Generate` stand for any unary and any streamed call. The request's `rollout_id`
selects what they do; `run_id` names a file that a waiting call waits for.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr
from seamflow.network.keepalive import Keepalive
from seamflow.rollout.v1 import rollout_service_pb2, rollout_service_pb2_grpc

from services.chassis.config.settings import ServerConfig, Settings
from services.chassis.errors import DependencyUnavailable, Reason, exhausted, invalid_argument
from services.chassis.rpc.server import Service, run

ROOT = Path(__file__).parents[3]
CANARY = "canary-9f3b"


class WithoutPingTimeout(Keepalive):
    """Keep-alive that does not see a frozen peer."""

    def options(self) -> list[tuple[str, int]]:
        """All but one."""
        return [pair for pair in super().options() if pair[0] != "grpc.http2.ping_timeout_ms"]


def fast_keepalive(*, sees: bool) -> Keepalive:
    """The usual one at a tenth of its times; or one that does not see a frozen peer."""
    return (Keepalive if sees else WithoutPingTimeout)(
        ping_seconds=1.0, pong_seconds=0.5, silence_seconds=0.5
    )


class InnerConfig(Settings):
    """A nested table."""

    step: int = Field(1, gt=0)
    """A whole number."""
    name: str = ""
    """A text."""
    ratio: float = 1.0
    """A ratio."""


class DemoConfig(ServerConfig):
    """Settings of the demo service."""

    mode: str = "serve"
    """What goes wrong: serve (nothing), dependency, crash, hang."""
    names: tuple[str, ...] = ()
    """A list."""
    rate: float = Field(1.0, ge=0)
    """A number."""
    limit: int | None = None
    """An optional number."""
    password: SecretStr | None = None
    """A secret."""
    inner: InnerConfig = InnerConfig()
    """Table [demo.inner]."""


class DemoServicer(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Answers, waits, fails or crashes, as the request asks."""

    async def StartRollout(self, request: Any, context: Any) -> Any:
        """Unary."""
        await _act(request)
        return rollout_service_pb2.StartRolloutResponse(credential=request.rollout_id)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Streamed: one heartbeat at once, then the answer."""
        yield rollout_service_pb2.GenerateResponse(heartbeat=rollout_service_pb2.Heartbeat())
        await _act(request)
        yield rollout_service_pb2.GenerateResponse(end=rollout_service_pb2.TurnEnd())


async def _act(request: Any) -> None:
    if request.rollout_id == "crash":
        raise RuntimeError(CANARY)
    if request.rollout_id == "refuse":
        raise exhausted(Reason.TOO_MANY_REQUESTS, "admission is closed", retry_after=2.5)
    if request.rollout_id == "wrong":
        raise invalid_argument("rollout_id", request.rollout_id, "give another")
    if request.rollout_id == "wait":
        await asyncio.to_thread(_wait_for, Path(request.run_id))


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def demo_service() -> Service:
    """The demo, ready to be served."""
    servicer = DemoServicer()
    return Service(
        [
            (rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server, servicer),
        ]
    )


@asynccontextmanager
async def _build(config: DemoConfig) -> AsyncIterator[Service]:
    if config.mode == "dependency":
        raise DependencyUnavailable("demo", "nobody there")
    if config.mode == "hang":
        print("hanging", flush=True)
        await asyncio.Event().wait()
    service = demo_service()
    yield Service(service.servicers, [_crash] if config.mode == "crash" else [])


async def _crash() -> None:
    raise RuntimeError(CANARY)


@dataclass(frozen=True, slots=True)
class DemoProcess:
    """A running demo."""

    process: subprocess.Popen[str]
    port: int
    admin_port: int

    @property
    def target(self) -> str:
        """Where it serves."""
        return f"127.0.0.1:{self.port}"

    def page(self, path: str) -> tuple[int, str]:
        """Status and body of an admin page."""
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tests.lib.chassis.support", *arguments],
        cwd=ROOT,
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def demo_popen(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start the demo; its stdout and stderr are one pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.lib.chassis.support", *arguments],
        cwd=ROOT,
        env=_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def demo_process(folder: Path, *arguments: str, **environment: str) -> Iterator[DemoProcess]:
    """Run the demo concurrently with the test; killed at the end if it still runs."""
    port_file = folder / "port.json"
    process = demo_popen(*arguments, SEAMFLOW_PORT_FILE=str(port_file), **environment)
    try:
        ports = _ports(process, port_file)
        yield DemoProcess(process, ports["port"], ports["admin_port"])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


@asynccontextmanager
async def frozen_caller(program: str, target: str) -> AsyncIterator[None]:
    """Run a caller until it prints its first line, then stop it; killed at the end."""
    caller = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        target,
        cwd=ROOT,
        env=_environment({}),
        stdout=subprocess.PIPE,
    )
    assert caller.stdout is not None
    await caller.stdout.readline()
    caller.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        caller.kill()
        await caller.wait()


def _ports(process: subprocess.Popen[str], path: Path) -> dict[str, int]:
    while not path.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the demo ended: {process.communicate()[0]}")
        time.sleep(0.01)
    ports: dict[str, int] = json.loads(path.read_text())
    return ports


def _environment(extra: dict[str, str]) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SEAMFLOW_")}
    return {**ours, "PYTHONPATH": f"{ROOT / 'sdk'}:{ROOT}", **extra}


if __name__ == "__main__":
    run("demo", DemoConfig, _build)
