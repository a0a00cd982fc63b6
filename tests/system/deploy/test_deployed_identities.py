"""The deployment's configuration and certificates in real processes: who may call what."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from seamflow.channel import connect
from seamflow.credentials import Credentials

from deploy.generate_secrets import generate
from tests.lib.deploy.support import CONFIG, ROOT, announced, running, secrets
from tests.lib.redis_server import RedisServer

OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
SAMPLES, RUNS = "trajectory.v1.SampleService", "trajectory.v1.RunService"


def configured(folder: Path, name: str, own: str) -> list[str | Path]:
    """Flags of a process: the deployment's file, with the secrets of `own` where they are here."""
    file = folder / f"{name}.toml"
    text = (CONFIG / file.name).read_text()
    file.write_text(text.replace("/secrets/", f"{folder / 'secrets' / own}/"))
    return ["--config", file]


def environment(**variables: str) -> dict[str, str]:
    """For a process of this checkout."""
    return {**os.environ, "PYTHONPATH": ":".join(sys.path), **variables}


@pytest.fixture
def manager(tmp_path: Path, redis_server: RedisServer) -> Iterator[str]:
    """The address of a trajectory manager with its own certificate."""
    secrets(tmp_path)
    ports = tmp_path / "ports.json"
    settings = {
        "HOST": "127.0.0.1",
        "PORT": "0",
        "ADMIN_PORT": "-1",
        "REDIS_URL": redis_server.url,
        "DURABILITY": "fast",
    }
    variables = {f"SEAMFLOW_TRAJECTORY_MANAGER_{name}": v for name, v in settings.items()}
    command = [sys.executable, "-m", "trajectory_manager"]
    command += map(str, configured(tmp_path, "trajectory-manager", "trajectory-manager"))
    given = environment(SEAMFLOW_PORT_FILE=str(ports), **variables)
    with running(command, given, tmp_path / "manager.log") as process:
        yield f"127.0.0.1:{announced(process, ports)['port']}"


def credentials(folder: Path, service: str) -> Credentials:
    """What the service's volume holds."""
    files = folder / "secrets" / service
    return Credentials(
        ca_file=files / "ca.pem",
        cert_file=files / service / "cert.pem",
        key_file=files / service / "key.pem",
    )


async def code_of(call: Any) -> grpc.StatusCode:
    """How an empty request ends."""
    try:
        await call(b"")
    except grpc.aio.AioRpcError as error:
        return error.code()
    return OK


async def test_each_service_may_do_what_is_its_own(tmp_path: Path, manager: str) -> None:
    """The run is created by the job; the ledger is the trainer's; the list is the operator's."""
    create: list[str | Path] = [sys.executable, "-m", "deploy.create_run"]
    create += configured(tmp_path, "run", "create-run")
    given = environment(SEAMFLOW_RUN_TRAJECTORY_MANAGER=manager, SEAMFLOW_RUN_DURABILITY="fast")
    done = await asyncio.to_thread(subprocess.run, create, env=given, cwd=ROOT, check=False)
    assert done.returncode == 0
    opened = {}
    for service in ("trainer", "dataloader", "operator", "agent-runner", "redis"):
        async with connect(manager, credentials(tmp_path, service)) as channel:
            for rpc in (f"{SAMPLES}/Reconcile", f"{RUNS}/ListRuns"):
                call: Any = channel.unary_unary(f"/seamflow.{rpc}")
                if await code_of(call) not in (DENIED, grpc.StatusCode.UNAUTHENTICATED):
                    opened[service] = rpc
    assert opened == {"trainer": f"{SAMPLES}/Reconcile", "operator": f"{RUNS}/ListRuns"}


async def test_renewed_certificates_are_taken_up_on_both_sides(
    tmp_path: Path, manager: str
) -> None:
    """`--renew` beside running processes: the next calls connect with the new ones."""
    async with connect(manager, credentials(tmp_path, "operator")) as channel:
        call: Any = channel.unary_unary(f"/seamflow.{RUNS}/ListRuns")
        assert await code_of(call) is OK
        first = channel._channel  # type: ignore[attr-defined]
        generate(tmp_path / "authority", tmp_path / "secrets", renew=True)
        await asyncio.sleep(1.1)  # files are looked at once a second
        assert await code_of(call) is OK
        assert channel._channel is not first  # type: ignore[attr-defined]
