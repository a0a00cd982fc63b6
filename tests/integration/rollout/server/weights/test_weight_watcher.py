"""Following the weights service over real gRPC: one that publishes, dies and lies."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch
from prometheus_client import REGISTRY
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.stubs import async_stub
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.fake import FakeEngine
from services.chassis.rpc.server import started
from services.lib.token_bytes import unpack_ids, unpack_logprobs
from services.weights.config import WeightsConfig
from tests.lib.rollout.server.client import expected_tokens, fake_config, read, serving
from tests.lib.rollout.server.support import recompute, save_model
from tests.lib.rollout.server.weights.weight_service import TinyWeightService
from tests.lib.weights.support import Trainer, in_memory


def folder_with(path: Path, content: bytes) -> Path:
    """A weights folder for the fake engine."""
    path.mkdir()
    (path / "model.safetensors").write_bytes(content)
    return path


async def test_newest_committed_weights_are_loaded_before_traffic(tmp_path: Path) -> None:
    """A joining server starts with the newest committed version, not with its model folder."""
    weights = TinyWeightService()
    await weights.publish(3, folder_with(tmp_path / "three", b"3"))
    await weights.publish(4, folder_with(tmp_path / "four", b"4"))
    async with (
        weights.serving() as port,
        serving(fake_config(weights=f"127.0.0.1:{port}")) as client,
    ):
        token_ids, versions, _ = await read(client.generate())
        assert versions == [4] * 32
        assert token_ids == expected_tokens((3, 4, 5), versions)
    assert weights.fetched == [(4, "model.safetensors")]


async def test_turns_live_through_published_versions(tmp_path: Path) -> None:
    """A turn in flight continues under each new version, every token labelled with its own."""
    weights = TinyWeightService()
    cache = tmp_path / "cache"
    async with weights.serving() as port:
        config = fake_config(
            weights=f"127.0.0.1:{port}", fake_step_seconds=0.001, cache_folder=cache
        )
        async with serving(config) as client:
            await client.serving(0)
            turn = asyncio.create_task(read(client.generate(max_new_tokens=1500)))
            for version in range(1, 5):
                await client.until(lambda info: info.num_running == 1)
                await weights.publish(version, folder_with(tmp_path / str(version), b"w"))
                await client.serving(version)
            token_ids, versions, finish = await turn
            loaded = (await client.info()).loaded_versions
    assert [each.weight_version for each in loaded] == [1, 2, 3, 4]
    times = [each.load_time.ToMicroseconds() for each in loaded]
    assert times == sorted(times)
    assert times[0] > 0
    assert finish == tokens_pb2.FINISH_REASON_LENGTH
    assert versions == sorted(versions)
    assert {0, 4} <= set(versions)
    assert token_ids == expected_tokens((3, 4, 5), versions)
    # Negative control: with the labels of the version after, the recomputation does not agree.
    assert token_ids != expected_tokens((3, 4, 5), [version + 1 for version in versions])
    assert sorted(path.name for path in cache.iterdir()) == ["weight_v000003", "weight_v000004"]


async def test_dead_weights_service_is_waited_for(tmp_path: Path) -> None:
    """Without its weights service a server starts late, and keeps serving when it dies later."""
    weights = TinyWeightService()
    await weights.publish(1, folder_with(tmp_path / "one", b"1"))
    async with weights.serving() as port:
        pass
    async with serving(fake_config(weights=f"127.0.0.1:{port}")) as client:
        assert (await client.info()).state == pb.SERVER_STATE_PAUSED
        waiting = asyncio.create_task(read(client.generate()))
        async with weights.serving(port):
            assert (await waiting)[1] == [1] * 32
        assert (await read(client.generate()))[1] == [1] * 32
        await weights.publish(2, folder_with(tmp_path / "two", b"2"))
        async with weights.serving(port):
            await client.serving(2)


async def test_damaged_shards_are_refused_and_fetched_again(tmp_path: Path) -> None:
    """Bytes that do not match their checksum never reach the engine; the next try may."""
    weights = TinyWeightService()
    async with (
        weights.serving() as port,
        serving(fake_config(weights=f"127.0.0.1:{port}")) as client,
    ):
        await client.serving(0)
        weights.corrupt = True
        await weights.publish(1, folder_with(tmp_path / "one", b"123"))
        await weights.until_fetched(2)
        assert (await client.info()).weight_version == 0
        assert (await read(client.generate()))[1] == [0] * 32
        weights.corrupt = False
        await client.serving(1)


async def test_restored_server_has_current_weights(tmp_path: Path) -> None:
    """Released, a server interrupts turns; restored, it serves the newest version."""
    weights = TinyWeightService()
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(weights.serving())
        config = fake_config(weights=f"127.0.0.1:{port}", fake_step_seconds=0.001)
        client = await stack.enter_async_context(serving(config))
        await client.serving(0)
        stream = aiter(client.generate(max_new_tokens=4000))
        await anext(stream)
        await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest())
        assert (await read(stream))[2] == tokens_pb2.FINISH_REASON_INTERRUPTED
        for version in (1, 2, 3):
            await weights.publish(version, folder_with(tmp_path / str(version), b"w"))
        info = await client.info()
        assert (info.state, info.weight_version) == (pb.SERVER_STATE_RELEASED, 0)
        with pytest.raises(grpc.aio.AioRpcError, match="released"):
            await client.stub.Resume(pb.ResumeRequest())
        restored = await client.stub.RestoreMemory(pb.RestoreMemoryRequest())
        assert restored.weight_version == 3
        assert (await read(client.generate()))[1] == [3] * 32


async def test_a_version_committed_during_a_restore_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Announced while the engine takes its memory back, it is swapped in afterwards."""
    weights, gate, restore = TinyWeightService(), asyncio.Event(), FakeEngine.restore_memory

    async def restore_slowly(self: FakeEngine) -> None:
        await weights.publish(1, folder_with(tmp_path / "one", b"1"))
        await gate.wait()
        await restore(self)

    monkeypatch.setattr(FakeEngine, "restore_memory", restore_slowly)
    async with (
        weights.serving() as port,
        serving(fake_config(weights=f"127.0.0.1:{port}")) as client,
    ):
        await client.serving(0)
        await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest())
        restoring = asyncio.ensure_future(client.stub.RestoreMemory(pb.RestoreMemoryRequest()))
        await weights.until_fetched(1)
        # The server has what it needs to judge the version, and time to do so.
        await asyncio.sleep(0.2)
        gate.set()
        assert (await restoring).weight_version == 0
        await client.serving(1)


async def test_restore_waits_for_the_weights_service_rather_than_serve_stale(
    tmp_path: Path,
) -> None:
    """While the weights service is unavailable, the server stays released."""
    weights = TinyWeightService()
    async with AsyncExitStack() as stack:
        async with weights.serving() as port:
            client = await stack.enter_async_context(
                serving(fake_config(weights=f"127.0.0.1:{port}"))
            )
            await client.serving(0)
            await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.stub.RestoreMemory(pb.RestoreMemoryRequest(), timeout=0.5)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await client.info()).state == pb.SERVER_STATE_RELEASED
        await weights.publish(1, folder_with(tmp_path / "one", b"1"))
        async with weights.serving(port):
            restored = await client.stub.RestoreMemory(pb.RestoreMemoryRequest())
            assert restored.weight_version == 1


async def test_update_weights_loads_the_version_asked_for(tmp_path: Path) -> None:
    """An explicit update takes any committed version, and names one that is not."""
    weights = TinyWeightService()
    await weights.publish(1, folder_with(tmp_path / "one", b"1"))
    await weights.publish(2, folder_with(tmp_path / "two", b"2"))
    async with (
        weights.serving() as port,
        serving(fake_config(weights=f"127.0.0.1:{port}")) as client,
    ):
        await client.serving(2)
        updated = await client.stub.UpdateWeights(pb.UpdateWeightsRequest(weight_version=1))
        assert updated.weight_version == 1
        assert (await read(client.generate()))[1] == [1] * 32
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.stub.UpdateWeights(pb.UpdateWeightsRequest(weight_version=9))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_real_model_recomputes_across_published_versions(tmp_path: Path) -> None:
    """With the torch engine each span's log-probs are those of the published weights it names."""
    folders = [save_model(tmp_path / f"model{seed}", seed=seed) for seed in range(3)]
    weights = TinyWeightService()
    logprobs: list[float] = []
    token_ids: list[int] = []
    versions: list[int] = []
    async with weights.serving() as port:
        config = RolloutServerConfig(
            port=0,
            model=folders[0],
            run_id="run",
            weights=f"127.0.0.1:{port}",
            stream_interval=4,
        )
        async with serving(config) as client:
            await client.serving(0)
            async for response in client.generate(max_new_tokens=400):
                tokens = response.tokens
                logprobs += unpack_logprobs(tokens.logprobs)
                token_ids += unpack_ids(tokens.token_ids)
                versions += [s.weight_version for s in tokens.spans for _ in range(s.num_tokens)]
                wanted = versions[-1] + 1
                if wanted < 3 and wanted not in weights.folders:
                    await weights.publish(wanted, folders[wanted])
                    await client.serving(wanted)
    assert set(versions) == {0, 1, 2}
    recomputed = torch.stack([recompute(f, (3, 4, 5), token_ids) for f in folders])
    claimed = recomputed.gather(0, torch.tensor(versions)[None])[0]
    assert torch.allclose(torch.tensor(logprobs), claimed, atol=1e-3, rtol=0)


@pytest.mark.parametrize("transport", ["shared_folder", "shard_stream"])
async def test_versions_of_the_real_weights_service_are_followed(
    tmp_path: Path, transport: str
) -> None:
    """A published version is served: linked where a folder is common, else fetched by rpc."""
    weights_config = WeightsConfig(
        redis_url="redis://oracle",
        port=0,
        folder=tmp_path / "published",
        drain_seconds=0.0,
        offer_folder=transport == "shared_folder",
    )
    before = _fetches(transport)
    async with AsyncExitStack() as stack:
        service = in_memory(weights_config)
        port = await stack.enter_async_context(started(service, weights_config, "weights"))
        address = f"127.0.0.1:{port}"
        cache = tmp_path / "cache"
        config = fake_config(weights=address, cache_folder=cache)
        client = await stack.enter_async_context(serving(config))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        await client.serving(0)
        trainer = Trainer(stub=async_stub(WeightServiceStub, channel))
        for step in (1, 2):
            data = bytes([step]) * 3_000_000
            version = await trainer.publish_uploaded(step, {"model.safetensors": data})
            await client.serving(version)
            assert (await read(client.generate()))[1] == [version] * 32
            assert (cache / f"weight_v{version:06d}" / "model.safetensors").read_bytes() == data
    assert _fetches(transport) == before + 2


def _fetches(transport: str) -> float:
    """Versions that this transport has fetched."""
    labels = {"transport": transport, "outcome": "ok"}
    name = "seamflow_rollout_server_weight_fetches_total"
    return REGISTRY.get_sample_value(name, labels) or 0.0
