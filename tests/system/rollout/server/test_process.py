"""`python -m rollout.server` as its own process: exit codes, messages, drain."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.stubs import async_stub

from services.lib.token_bytes import pack_ids

ROOT = Path(__file__).parents[4]


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[Process]:
    """A rollout server; killed at the end if it still runs."""
    path = os.pathsep.join([str(ROOT / "sdk"), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollout.server",
        "--port",
        "0",
        *flags,
        env=env,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.communicate()


async def port_of(child: Process) -> int:
    """Wait for the line with its port."""
    assert child.stdout is not None
    async for line in child.stdout:
        event = json.loads(line)
        if event["msg"] == "serving":
            return int(event["port"])
    raise AssertionError("the server ended before it served")


async def test_terminated_server_gives_its_turns_up_and_exits_clean() -> None:
    """SIGTERM in mid-turn: the turn ends INTERRUPTED with its tokens, the process with 0."""
    flags = ("--engine", "fake", "--run-id", "run", "--fake-step-seconds", "0.005")
    async with process(*flags) as child:
        port = await port_of(child)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = pb.GenerateTokensRequest(
                run_id="run",
                token_ids=pack_ids([3, 4]),
                sampling=tokens_pb2.SamplingParams(max_new_tokens=4000, ignore_eos=True),
            )
            stub = async_stub(RolloutServerServiceStub, channel)
            stream = aiter(stub.GenerateTokens(request))
            responses = [await anext(stream)]
            child.terminate()
            responses += [response async for response in stream]
        assert responses[-1].finish_reason == tokens_pb2.FINISH_REASON_INTERRUPTED
        await child.communicate()
        assert child.returncode == 0


async def test_dead_engine_ends_the_process_with_70() -> None:
    """A plugged-in engine serves; when it fails, the process ends so that it can be restarted."""
    flags = ("--engine", "tests.system.rollout.server.plugin_engine:build", "--run-id", "run")
    async with process(*flags) as child:
        port = await port_of(child)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = pb.GenerateTokensRequest(run_id="run", token_ids=pack_ids([3, 4]))
            stub = async_stub(RolloutServerServiceStub, channel)
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in stub.GenerateTokens(request):
                    pass
        output, _ = await child.communicate()
    assert child.returncode == 70
    assert b"fell off the bus" in output


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--engine", "torhc"), "did you mean torch?"),
        (("--engine", "no.such:Engine"), "no.such"),
        (("--engine", "fake", "--max-running", "0"), "max_running is '0'"),
    ],
)
async def test_unusable_configuration_exits_78_by_name(flags: tuple[str, ...], named: str) -> None:
    """A configuration that cannot be used ends the process with 78 and an error that names it."""
    async with process(*flags) as child:
        _, errors = await child.communicate()
    assert child.returncode == 78
    assert named in errors.decode()
