"""Create the run of a deployment with the rules of table `[run]`, then exit.

    python -m deploy.create_run --config deploy/config/run.toml

Doing it again with the same rules changes nothing.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from pydantic import Field
from seamflow.errors import SeamflowError
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trajectory.v1.run_service_pb2 import CreateRunRequest
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

from services.chassis.config.load import load_or_exit
from services.chassis.errors import ExitCode
from services.chassis.rpc.clients import channel
from services.launcher.run_rules import RunRules, rules

__all__ = ["CreateRunConfig", "main"]


class CreateRunConfig(RunRules):
    """Settings of the run."""

    run_id: str
    """Training job."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager."""
    timeout_seconds: float = Field(60.0, gt=0)
    """How long to wait for the trajectory manager."""
    durability: Literal["fast", "durable", "replicated"] = "durable"
    """durable: every acknowledged write is on disk; replicated: also on every replica."""


def main() -> None:
    """Create the run; exit codes: 69 trajectory manager unavailable, 78 rules rejected."""
    config = load_or_exit(CreateRunConfig, "run")
    try:
        created = asyncio.run(_create(config))
    except TimeoutError:
        _end(f"no answer from {config.trajectory_manager}", ExitCode.UNAVAILABLE)
    except SeamflowError as error:
        _end(str(error), ExitCode.CONFIG)
    else:
        sys.stdout.write(f"run {config.run_id} {'created' if created else 'exists'}\n")


async def _create(config: CreateRunConfig) -> bool:
    request = CreateRunRequest(run_id=config.run_id, config=rules(config))
    async with (
        asyncio.timeout(config.timeout_seconds),
        channel(config, config.trajectory_manager) as manager,
    ):
        stub = async_stub(RunServiceStub, manager)
        answer = await retrying(lambda: stub.CreateRun(request))
    return answer.created


def _end(message: str, code: ExitCode) -> None:
    sys.stderr.write(f"create_run: {message}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
