"""The SGLang adapter against a stub of SGLang's HTTP API; the contract suite runs the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import (
    EngineError,
    EngineFailed,
    EngineStateError,
    FinishReason,
    PauseMode,
    VersionSource,
    WeightsError,
)
from rollout.server.engines.sglang.sglang_engine import SGLangEngine
from services.lib.routed_experts import ExpertRecord
from tests.lib.rollout.server.engines.sglang_stub import StubSGLang
from tests.lib.rollout.server.routed_experts import SHAPE, save_experts, whole
from tests.lib.rollout.server.support import Output, collect, request, save_model, settle


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of one model."""
    base = tmp_path_factory.mktemp("models")
    return save_model(base / "a", seed=1), save_model(base / "b", seed=2)


@pytest.fixture
async def stub() -> StubSGLang:
    """A server that is not serving yet."""
    return StubSGLang()


@pytest.fixture
async def engine(stub: StubSGLang, folders: tuple[Path, Path]) -> AsyncIterator[SGLangEngine]:
    """The adapter, connected to the stub."""
    async with stub.serving() as url:
        engine = SGLangEngine(RolloutServerConfig(model=folders[0], sglang_url=url))
        await engine.start()
        stub.calls.clear()
        yield engine
        stub.gate.set()
        await engine.close()


def mismatches() -> float:
    """Chunks so far for which the engine named other weights."""
    name = "seamflow_rollout_server_weight_version_mismatches_total"
    return REGISTRY.get_sample_value(name) or 0.0


def expected(count: int, prefix: int = 3) -> list[int]:
    """What the stub gives after a prefix of this length."""
    return [(prefix + n) % 64 for n in range(count)]


async def test_start_takes_over_whatever_state_a_server_is_in(
    stub: StubSGLang, folders: tuple[Path, Path]
) -> None:
    """It is resumed, emptied and given version 0, whatever its previous client did."""
    async with stub.serving() as url:
        stub.label = "17"
        engine = SGLangEngine(RolloutServerConfig(model=folders[0], sglang_url=url))
        await engine.start()
        assert stub.calls[:4] == [
            "model_info",
            "continue_generation",
            "flush_cache",
            "update_weights_from_disk",
        ]
        assert (stub.label, engine.weight_version) == ("0", 0)
        await engine.close()


async def test_engine_that_is_not_started_says_so(folders: tuple[Path, Path]) -> None:
    """Nothing is known of it yet; closing it is no error."""
    engine = SGLangEngine(RolloutServerConfig(model=folders[0], sglang_url="http://127.0.0.1:1"))
    for asked in (engine.load, lambda: engine.weight_version, lambda: engine.info):
        with pytest.raises(EngineStateError, match="not started"):
            asked()
    await engine.close()


async def test_tokens_carry_how_their_version_is_known(
    engine: SGLangEngine, stub: StubSGLang
) -> None:
    """Streamed tokens rest on our boundary; the last ones have the engine's own word."""
    chunks = [chunk async for chunk in engine.generate(request(max_new_tokens=12, seed=None))]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected(12)
    assert [chunk.version_source for chunk in chunks] == [
        VersionSource.SERVER_BOUNDARY,
        VersionSource.SERVER_BOUNDARY,
        VersionSource.ENGINE,
    ]
    assert chunks[0].logprobs == (-3.0, -4.0, -5.0, -6.0)


async def test_held_turn_goes_on_from_its_longer_prefix(
    engine: SGLangEngine, stub: StubSGLang, folders: tuple[Path, Path]
) -> None:
    """A pause ends the request, with its last tokens; resume sends a new one with what is left."""
    output, boundary = Output(), 0
    async for chunk in engine.generate(request(max_new_tokens=40, seed=None)):
        output.add(chunk)
        if len(stub.requests) == 1 and chunk.finish is None:
            await engine.pause(PauseMode.RETRACT)
            assert not stub.running
            boundary = stub.requests[0].sent
            await engine.update_weights(folders[1], 5)
            await engine.resume()
    assert output.token_ids == expected(40)
    assert output.versions == [0] * boundary + [5] * (40 - boundary)
    again = stub.requests[1].body
    assert again["input_ids"][:3] == [3, 4, 5]
    assert len(again["input_ids"]) == 3 + boundary
    assert again["sampling_params"]["max_new_tokens"] == 40 - boundary
    assert stub.calls[-2:] == ["flush_cache", "update_weights_from_disk"]


async def test_pause_right_after_resume_lets_nothing_through(
    engine: SGLangEngine, stub: StubSGLang
) -> None:
    """A turn that resume has woken, but that has not run yet, stays held."""
    stub.gate.clear()
    reader = asyncio.create_task(collect(engine.generate(request(max_new_tokens=8, seed=None))))
    while not stub.running:
        await asyncio.sleep(0.001)
    for _ in range(3):
        await engine.pause(PauseMode.RETRACT)
        await engine.resume()
    await engine.pause(PauseMode.RETRACT)
    sent = len(stub.requests)
    await settle()
    assert len(stub.requests) == sent
    stub.gate.set()
    await engine.resume()
    assert (await reader).token_ids == expected(8)


async def test_abort_is_repeated_for_a_request_on_its_way(
    engine: SGLangEngine, stub: StubSGLang
) -> None:
    """A pause waits for a request that SGLang does not know yet, and aborts it when it does."""
    stub.late = asyncio.Event()
    reader = asyncio.create_task(collect(engine.generate(request(max_new_tokens=300, seed=None))))
    while not stub.requests:
        await asyncio.sleep(0.001)
    pausing = asyncio.create_task(engine.pause(PauseMode.ABORT))
    while stub.calls.count("abort_request") < 2:
        await asyncio.sleep(0.001)
    assert not pausing.done()
    stub.late.set()
    await pausing
    output = await reader
    assert (output.finish, len(output.token_ids) < 300) == (FinishReason.INTERRUPTED, True)


async def test_closed_turn_is_aborted_even_if_sglang_knows_it_late(
    engine: SGLangEngine, stub: StubSGLang
) -> None:
    """The first abort is lost; the request's first message brings the next one."""
    stub.late = asyncio.Event()
    reader = asyncio.create_task(collect(engine.generate(request(max_new_tokens=300, seed=None))))
    while not stub.requests:
        await asyncio.sleep(0.001)
    reader.cancel()
    while "abort_request" not in stub.calls:
        await asyncio.sleep(0.001)
    stub.late.set()
    while engine.load().queued + engine.load().running:
        await asyncio.sleep(0.001)
    assert 0 < stub.requests[0].sent < 300


async def test_stop_id_ends_a_turn_that_ignores_end_of_sequence(
    engine: SGLangEngine, stub: StubSGLang
) -> None:
    """SGLang ignores all stop ids with ignore_eos: the adapter cuts, and aborts the request."""
    wanted = request(max_new_tokens=300, seed=None, stop_token_ids=(8,))
    output = await collect(engine.generate(wanted))
    assert (output.token_ids, output.finish) == (expected(6), FinishReason.STOP)
    while stub.running:
        await asyncio.sleep(0.001)
    assert stub.requests[0].sent < 300


async def test_engine_that_knows_better_wins_and_is_counted(
    engine: SGLangEngine, stub: StubSGLang
) -> None:
    """Another client changed the weights: the label is the engine's, and a metric counts it."""
    before = mismatches()
    stub.label = "8"
    output = await collect(engine.generate(request(max_new_tokens=8, seed=None)))
    assert set(output.versions) == {8}
    assert output.sources == {VersionSource.ENGINE}
    assert mismatches() == before + 2
    stub.label = "theirs"
    with pytest.raises(EngineFailed, match="'theirs'"):
        await collect(engine.generate(request(max_new_tokens=8, seed=None)))


async def test_tokens_after_an_update_in_place_wait_for_the_engines_word(
    engine: SGLangEngine, stub: StubSGLang, folders: tuple[Path, Path]
) -> None:
    """What comes before is handed out at once, the rest at the end with the engine's spans."""
    chunks = []
    async for chunk in engine.generate(request(max_new_tokens=40, seed=None)):
        chunks.append(chunk)
        if len(chunks) == 1:
            stub.gate.clear()
            await engine.pause(PauseMode.IN_PLACE)
            await engine.update_weights(folders[1], 5)
            await engine.resume()
            stub.gate.set()
    assert [token for chunk in chunks for token in chunk.token_ids] == expected(40)
    versions = [chunk.weight_version for chunk in chunks for _ in chunk.token_ids]
    switch = stub.requests[0].spans[0]["end"]
    assert isinstance(switch, int)
    assert versions == [0] * switch + [5] * (40 - switch)
    assert chunks[-1].version_source is VersionSource.ENGINE


async def test_refused_weights_are_replaced_by_the_last_ones(
    engine: SGLangEngine, stub: StubSGLang, folders: tuple[Path, Path]
) -> None:
    """A failed load may leave a mixture, so the old weights are loaded again."""
    await engine.pause(PauseMode.RETRACT)
    stub.refuse = ["update_weights_from_disk"]
    with pytest.raises(WeightsError, match="refused /update_weights_from_disk"):
        await engine.update_weights(folders[1], 5)
    assert stub.calls.count("update_weights_from_disk") == 2
    assert (engine.weight_version, stub.label) == (0, "0")


async def test_engine_that_refuses_its_last_weights_too_is_dead(
    engine: SGLangEngine, stub: StubSGLang, folders: tuple[Path, Path]
) -> None:
    """Its weights are unknown then."""
    await engine.pause(PauseMode.RETRACT)
    stub.refuse = ["update_weights_from_disk"] * 2
    with pytest.raises(EngineFailed, match="cannot load its last weights"):
        await engine.update_weights(folders[1], 5)
    assert stub.calls.count("update_weights_from_disk") == 2
    with pytest.raises(EngineFailed):
        await engine.wait_failed()


async def test_turn_whose_versions_nobody_tells_goes_on_from_before_them(
    engine: SGLangEngine, stub: StubSGLang, folders: tuple[Path, Path]
) -> None:
    """Without the engine's word the tokens after an update in place do not count, nor their end."""
    stub.omit = {"weight_versions"}
    output = Output()
    async for chunk in engine.generate(request(max_new_tokens=40, seed=None)):
        output.add(chunk)
        if len(output.token_ids) == 4:
            stub.gate.clear()
            await engine.pause(PauseMode.IN_PLACE)
            await engine.update_weights(folders[1], 5)
            await engine.resume()
            stub.gate.set()
    assert output.finish is FinishReason.INTERRUPTED
    assert output.token_ids == expected(len(output.token_ids))
    assert len(output.token_ids) < 40 == stub.requests[0].sent
    assert set(output.versions) == {0}


@pytest.mark.parametrize("field", ["output_ids", "output_token_logprobs", "finish_reason"])
async def test_answer_that_makes_no_sense_fails_the_engine(
    engine: SGLangEngine, stub: StubSGLang, field: str
) -> None:
    """Whatever a message lacks, its turn does not wait for ever."""
    stub.omit = {field}
    with pytest.raises(EngineFailed, match=f"makes no sense.*{field}"):
        await collect(engine.generate(request(max_new_tokens=8, seed=None)))
    with pytest.raises(EngineFailed, match=field):
        await engine.wait_failed()


async def test_engine_closes_even_if_sglang_refuses_to_abort(
    engine: SGLangEngine, stub: StubSGLang
) -> None:
    """Open turns end INTERRUPTED, and no connection stays open."""
    stub.refuse = ["abort_request"]
    output = Output()
    async for chunk in engine.generate(request(max_new_tokens=300, seed=None)):
        if not output.token_ids:
            stub.gate.clear()
            await engine.close()
        output.add(chunk)
    assert output.finish is FinishReason.INTERRUPTED
    stub.gate.set()
    while stub.running:
        await asyncio.sleep(0.001)
    assert stub.requests[0].sent < 300


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_what_sglang_refuses_is_an_error_of_the_engine(
    engine: SGLangEngine, stub: StubSGLang, mode: PauseMode
) -> None:
    """Callers know `EngineError` alone; the engine lives on."""
    stub.gate.clear()
    reader = asyncio.create_task(collect(engine.generate(request(max_new_tokens=8, seed=None))))
    while not stub.running:
        await asyncio.sleep(0.001)
    stub.refuse = ["abort_request", "pause_generation"]
    with pytest.raises(EngineError, match="SGLang refused /"):
        await engine.pause(mode)
    stub.refuse.clear()
    await engine.pause(mode)
    await engine.resume()
    stub.gate.set()
    assert (await reader).token_ids == expected(8)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("truncated", "cut short"),
        ("missing", "has no model"),
        ("another", "has shape|the model has no"),
        ("empty", "has no weights"),
    ],
)
async def test_weights_that_do_not_fit_never_reach_sglang(
    engine: SGLangEngine, stub: StubSGLang, tmp_path: Path, damage: str, named: str
) -> None:
    """Truncated files, missing tensors and other models are refused from their headers."""
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path / "x", "llama" if damage == "another" else "qwen3", seed=3)
    file = folder / "model.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "missing":
        tensors = load_file(file)
        tensors.pop("model.norm.weight")
        save_file(tensors, file)
    elif damage == "empty":
        file.unlink()
    await engine.pause(PauseMode.RETRACT)
    with pytest.raises(WeightsError, match=named):
        await engine.update_weights(folder, 5)
    assert "update_weights_from_disk" not in stub.calls
    assert engine.weight_version == 0


async def test_lost_stream_fails_the_engine(stub: StubSGLang, folders: tuple[Path, Path]) -> None:
    """A stream without its last message means the server is gone, for every turn."""
    async with stub.serving() as url:
        engine = SGLangEngine(RolloutServerConfig(model=folders[0], sglang_url=url))
        await engine.start()
        stub.gate.clear()
        turns = [engine.generate(request(max_new_tokens=8, seed=None)) for _ in range(2)]
        readers = [asyncio.create_task(collect(turn)) for turn in turns]
        while len(stub.running) < 2:
            await asyncio.sleep(0.001)
    for reader in readers:
        with pytest.raises(EngineFailed, match="lost in mid-turn"):
            await reader
    with pytest.raises(EngineFailed):
        await engine.wait_failed()
    await engine.close()


async def test_routed_experts_are_placed_over_pauses(tmp_path: Path, stub: StubSGLang) -> None:
    """Each request has those of its own passes, with its last message: none is lost, none twice."""
    stub.returns_experts = True
    async with stub.serving() as url:
        engine = SGLangEngine(
            RolloutServerConfig(
                model=save_experts(tmp_path), sglang_url=url, record_routed_experts=True
            )
        )
        await engine.start()
        records: list[ExpertRecord] = []
        output, stream = Output(), engine.generate(replace(request(seed=None), routed_from=2))
        async for chunk in stream:
            output.add(chunk)
            records += [chunk.routed] if chunk.routed is not None else []
            if len(stub.requests) < 3 and chunk.finish is None:
                await engine.pause(PauseMode.RETRACT)
                await engine.resume()
        await engine.close()
    assert len(stub.requests) == 3
    assert sum(len(record.experts_TLK) for record in records) == 33
    experts = whole(records, 35)
    assert (experts[:2] == SHAPE.none).all()
    assert (experts[2:] == [[[n % 8] * 2] * 2 for n in range(1, 34)]).all()


async def test_a_server_that_returns_no_experts_is_refused(
    tmp_path: Path, stub: StubSGLang, folders: tuple[Path, Path]
) -> None:
    """And a model that has none."""
    async with stub.serving() as url:
        for folder, reason in (
            (save_experts(tmp_path), "start it with --enable-return-routed-experts"),
            (folders[0], "has no routed experts"),
        ):
            engine = SGLangEngine(
                RolloutServerConfig(model=folder, sglang_url=url, record_routed_experts=True)
            )
            with pytest.raises(ValueError, match=reason):
                await engine.start()
            await engine.close()
