"""`engine = "sglang"` in a whole rollout server, with a real SGLang that gets killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.stubs import async_stub

from tests.lib.rollout.server.client import serving
from tests.lib.rollout.server.engines.sglang_stub import StubSGLang
from tests.lib.rollout.server.sglang_server import (
    ENVIRONMENT,
    FLAGS,
    PYTHON,
    sglang_config,
    sglang_server,
)
from tests.lib.rollout.server.support import recompute, save_model
from tests.lib.rollout.server.weights.weight_service import TinyWeightService
from tests.system.rollout.server.test_process import port_of, process

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

COMMAND = ",".join((str(PYTHON), "-m", "sglang.launch_server"))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two versions of one model."""
    base = tmp_path_factory.mktemp("models")
    yield save_model(base / "a", seed=1), save_model(base / "b", seed=2)


def engines_of(pid: int, besides: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Processes of each SGLang that `pid` has started, its guard first; `besides` are not asked."""
    guards = [
        child
        for child in psutil.Process(pid).children()
        if child not in besides and any("process_guard" in part for part in child.cmdline())
    ]
    return [found for guard in guards for found in (guard, *guard.children(recursive=True))]


async def until_gone(processes: list[psutil.Process]) -> None:
    """Wait until none of them runs; the test's timeout bounds it."""
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        await asyncio.sleep(0.05)


def answer(url: str, path: str, method: str = "GET") -> Any:
    """What a server says to one call."""
    body = b"{}" if method == "POST" else None
    called = urllib.request.Request(
        url + path, data=body, method=method, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(called, timeout=60) as response:
        return json.load(response)


def shape(value: object) -> object:
    """Names and kinds of a JSON value; numbers are of one kind."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return "number" if type(value) in (int, float) else type(value).__name__


def known(real: object, claimed: object) -> object:
    """The part of `real` whose names `claimed` has."""
    if isinstance(claimed, dict) and isinstance(real, dict):
        return {name: known(real.get(name), each) for name, each in claimed.items()}
    if isinstance(claimed, list) and isinstance(real, list):
        return [known(*pair) for pair in zip(real, claimed, strict=False)]
    return real


def test_the_stub_claims_what_sglang_says(folders: tuple[Path, Path]) -> None:
    """Names and kinds of the constants it has, and the answers around a release of the memory."""
    with sglang_server(sglang_config(folders[0], lends_device=True)) as url:
        answers = {**answer(url, "/model_info"), **answer(url, "/server_info")}
        claimed = StubSGLang().facts()
        assert shape(known(answers, claimed)) == shape(claimed)
        assert answers["device"] == "cpu"
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            assert answer(url, path, "POST") is None


async def test_a_cpu_engine_gives_its_node_away_and_comes_back(
    folders: tuple[Path, Path],
) -> None:
    """It has no device memory to free; the restore loads the newest version."""
    weights = TinyWeightService()
    async with weights.serving() as port:
        config = sglang_config(folders[0], weights=f"127.0.0.1:{port}", lends_device=True)
        async with serving(config) as client:
            await client.serving(0)
            released = await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest())
            assert (released.num_bytes, (await client.info()).state) == (
                0,
                pb.SERVER_STATE_RELEASED,
            )
            await weights.publish(3, folders[1])
            await client.stub.RestoreMemory(pb.RestoreMemoryRequest())
            tokens = tokens_pb2.Tokens()
            async for response in client.generate(seed=None, temperature=0.7):
                tokens.MergeFromString(response.tokens.SerializeToString())
            assert {span.weight_version for span in tokens.spans} == {3}
            expected = recompute(folders[1], (3, 4, 5), list(tokens.token_ids), 0.7)
            assert list(tokens.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)


async def test_killed_engine_comes_back_with_the_newest_weights(
    folders: tuple[Path, Path],
) -> None:
    """A turn in flight fails over, and the next tokens are already those of the newest version."""
    weights = TinyWeightService()
    await weights.publish(3, folders[1])
    of_other_tests = engines_of(os.getpid())
    async with weights.serving() as port:
        config = sglang_config(folders[0], weights=f"127.0.0.1:{port}")
        async with serving(config) as client:
            await client.serving(3)
            turn = client.generate(max_new_tokens=400, seed=None, temperature=0.0)
            await anext(aiter(turn))
            engine = engines_of(os.getpid(), of_other_tests)
            assert len(engine) > 1
            # Of the workers, not of the main process: SGLang takes seconds to notice by itself.
            engine[-1].send_signal(signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in turn:
                    pass
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            await until_gone(engine)
            await client.serving(3)
            tokens = tokens_pb2.Tokens()
            async for response in client.generate(seed=None, temperature=0.7, top_p=0.9):
                tokens.MergeFromString(response.tokens.SerializeToString())
            assert {span.weight_version for span in tokens.spans} == {3}
            expected = recompute(folders[1], (3, 4, 5), list(tokens.token_ids), 0.7)
            assert list(tokens.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)
            last = engines_of(os.getpid(), of_other_tests)
    await until_gone(last)


async def test_killed_rollout_server_leaves_no_engine_behind(folders: tuple[Path, Path]) -> None:
    """Started from a command line, it serves; SIGKILLed, it takes all of SGLang with it."""
    flags = [f"--sglang-{flag[2:]}" if flag.startswith("--") else flag for flag in FLAGS]
    own = ("--engine", "sglang", "--model", str(folders[0]), "--run-id", "run")
    async with process(*own, f"--sglang-command={COMMAND}", *flags) as child:
        port = await port_of(child)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = async_stub(RolloutServerServiceStub, channel)
            info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.engine, info.max_context) == ("sglang", 512 - 6)
        engine = engines_of(child.pid)
        assert len(engine) > 2
        child.kill()
        await until_gone(engine)


async def test_flag_that_sglang_does_not_know_exits_78_by_name(folders: tuple[Path, Path]) -> None:
    """Its argument parser rejects it; our error names the flag and the closest one."""
    own = ("--engine", "sglang", "--model", str(folders[0]), "--run-id", "run")
    async with process(*own, f"--sglang-command={COMMAND}", "--sglang-tp-sise", "2") as child:
        _, errors = await child.communicate()
    assert child.returncode == 78
    assert "SGLang knows no --tp-sise; did you mean --tp-size?" in errors.decode()
