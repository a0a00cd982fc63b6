"""Record before forward: an agent gets no token before the store has acknowledged it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway import cli
from rollout.gateway.record.recorder import Recorder
from tests.integration.rollout.gateway.test_gateway import agent, first_chunk, ids_of
from tests.lib.rollout.gateway.support import ScriptedServer, scripted


class HeldRecorder(Recorder):
    """Withholds the acknowledgement of each append until the test allows one."""

    appended = asyncio.Event()
    """The turn waits for an acknowledgement."""
    acknowledgements: asyncio.Semaphore

    async def record(self, append: store_pb.TokenAppend) -> int:
        """Store, then wait."""
        num_tokens = await super().record(append)
        self.appended.set()
        await self.acknowledgements.acquire()
        return num_tokens


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[HeldRecorder]:
    """Every gateway of the test records with it."""
    monkeypatch.setattr(HeldRecorder, "appended", asyncio.Event())
    monkeypatch.setattr(HeldRecorder, "acknowledgements", asyncio.Semaphore(0), raising=False)
    monkeypatch.setattr(cli, "Recorder", HeldRecorder)
    return HeldRecorder


async def test_no_token_is_forwarded_before_its_recording_is_acknowledged(
    tmp_path: Path, recorder: type[HeldRecorder]
) -> None:
    """The agent gets heartbeats only, although the server has sent tokens, until the store answers.

    The last tokens end the turn, so neither they nor the end may come earlier.
    """
    server = ScriptedServer()
    server.answers = [[[7], [8, 9]]]
    async with scripted(server) as address, agent(tmp_path, address) as one:
        call = one.generate("turn")
        for expected in ([7], [8, 9]):
            await asyncio.wait_for(recorder.appended.wait(), 10)
            for _ in range(5):
                assert (await call.read()).WhichOneof("event") == "heartbeat"
            recorder.appended.clear()
            recorder.acknowledgements.release()
            assert list((await first_chunk(call)).chunk.tokens.token_ids) == expected
        assert (await first_chunk(call)).HasField("end")


async def test_acknowledged_tokens_are_forwarded_without_delay(tmp_path: Path) -> None:
    """Control: with the real recorder the same turn ends."""
    server = ScriptedServer()
    server.answers = [[[7], [8, 9]]]
    async with scripted(server) as address, agent(tmp_path, address) as one:
        assert await ids_of(one.generate("turn")) == [7, 8, 9]
