"""Every engine swaps weights under a pause and labels each token with its version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout.server.engines.engine import (
    Engine,
    EngineStateError,
    FinishReason,
    PauseMode,
    VersionSource,
    WeightsError,
)
from tests.integration.rollout.server.engine_contract.engines import SLOTS, wanted
from tests.lib.rollout.server.support import Output, collect, recompute, save_model, settle


async def across_an_update(engine: Engine, newer: Path, mode: PauseMode) -> Output:
    """200 tokens, the first under version 0, the last under version 5."""
    output = Output()
    async for chunk in engine.generate(wanted(engine, max_new_tokens=200)):
        output.add(chunk)
        if engine.weight_version == 0 and chunk.finish is None:
            await engine.pause(mode)
            await engine.update_weights(newer, 5)
            await engine.resume()
    return output


async def test_weight_update_splits_the_output_by_version(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """A sequence lives through an update; every token carries the version it was sampled under."""
    output = await across_an_update(engine, folders[1], PauseMode.RETRACT)
    assert len(output.token_ids) == 200
    switch = output.versions.index(5)
    assert output.versions == [0] * switch + [5] * (200 - switch)
    prefix = (3, 4, 5, *output.token_ids[:switch])
    fresh = await collect(engine.generate(wanted(engine, prefix, max_new_tokens=200 - switch)))
    assert fresh.token_ids == output.token_ids[switch:]
    if engine.info.name != "fake":
        for folder, start, end in ((folders[0], 0, switch), (folders[1], switch, 200)):
            tokens = output.token_ids[start:end]
            expected = recompute(folder, (3, 4, 5, *output.token_ids[:start]), tokens, 0.0)
            assert output.logprobs[start:end] == pytest.approx(expected.tolist(), abs=1e-4)


async def test_turns_waiting_for_a_slot_outlive_many_updates(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """More turns than slots, an update at every few tokens: all end whole, versions only grow."""
    turns = [wanted(engine, (3 + i,), max_new_tokens=60) for i in range(2 * SLOTS)]
    outputs = [Output() for _ in turns]
    readers = [
        asyncio.create_task(collect(engine.generate(turn), output))
        for turn, output in zip(turns, outputs, strict=True)
    ]
    version = 0

    def progress() -> tuple[int, bool]:
        done = all(reader.done() for reader in readers)
        return sum(len(output.token_ids) for output in outputs), done

    while not all(reader.done() for reader in readers):
        seen = progress()
        # Updates that leave no time for a token would go on for ever.
        while progress() == seen:
            await settle()
        version += 1
        await engine.pause(PauseMode.RETRACT)
        await engine.update_weights(folders[version % 2], version)
        await engine.resume()
    for output in outputs:
        assert (output.finish, len(output.token_ids)) == (FinishReason.LENGTH, 60)
        assert output.versions == sorted(output.versions)
        assert output.sources <= set(VersionSource)
    assert len({version for output in outputs for version in output.versions}) > 1


async def test_weight_update_needs_a_pause(engine: Engine, folders: tuple[Path, Path]) -> None:
    """Weights never change under a running sequence."""
    with pytest.raises(EngineStateError, match="pause it first"):
        await engine.update_weights(folders[1], 1)
    assert engine.weight_version == 0


async def test_missing_weights_leave_the_old_ones(engine: Engine, tmp_path: Path) -> None:
    """A folder that cannot be loaded changes neither version nor output."""
    before = await collect(engine.generate(wanted(engine)))
    await engine.pause(PauseMode.RETRACT)
    with pytest.raises(WeightsError, match="no such folder"):
        await engine.update_weights(tmp_path / "absent", 1)
    await engine.resume()
    assert engine.weight_version == 0
    assert (await collect(engine.generate(wanted(engine)))).token_ids == before.token_ids


async def test_weights_of_another_shape_are_refused_before_the_swap(
    engine: Engine, tmp_path: Path
) -> None:
    """Neither preparing nor loading such a folder changes anything, and both name the tensor."""
    if engine.info.name == "fake":
        pytest.skip("no model")
    other = save_model(tmp_path / "llama", architecture="llama", seed=3)
    before = await collect(engine.generate(wanted(engine)))
    with pytest.raises(WeightsError, match=r"the model has no|has shape|has no"):
        await engine.prepare_weights(other)
    await engine.pause(PauseMode.RETRACT)
    with pytest.raises(WeightsError, match=r"the model has no|has shape|has no"):
        await engine.update_weights(other, 1)
    await engine.resume()
    assert engine.weight_version == 0
    assert (await collect(engine.generate(wanted(engine)))).token_ids == before.token_ids


async def test_prepared_weights_are_swapped_in(engine: Engine, folders: tuple[Path, Path]) -> None:
    """Preparing while a turn runs changes nothing for it; the update takes what was prepared."""
    plain = await collect(engine.generate(wanted(engine, max_new_tokens=100)))
    output = Output()
    async for chunk in engine.generate(wanted(engine, max_new_tokens=100)):
        if not output.token_ids:
            await engine.prepare_weights(folders[1])
        output.add(chunk)
    assert output.token_ids == plain.token_ids
    await engine.pause(PauseMode.RETRACT)
    await engine.update_weights(folders[1], 1)
    await engine.resume()
    assert (await collect(engine.generate(wanted(engine)))).token_ids != plain.token_ids[:32]


async def test_update_in_place_labels_every_token(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """A turn that keeps its cache across an update has both versions; later turns are clean."""
    if "pause_in_place" not in engine.info.features:
        pytest.skip("the engine cannot pause in place")
    output = await across_an_update(engine, folders[1], PauseMode.IN_PLACE)
    switch = output.versions.index(5)
    assert output.versions == [0] * switch + [5] * (200 - switch)
    prefix = (3, 4, 5, *output.token_ids[:switch])
    later = await collect(engine.generate(wanted(engine, prefix)))
    assert set(later.versions) == {5}
    if engine.info.name != "fake":
        expected = recompute(folders[1], prefix, later.token_ids, 0.0)
        assert later.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


async def test_released_memory_comes_back_with_the_last_weights(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """Release needs a pause, refuses to resume, and restore brings back what was loaded last."""
    with pytest.raises(EngineStateError, match="pause it first"):
        await engine.release_memory()
    await engine.pause(PauseMode.RETRACT)
    await engine.update_weights(folders[1], 3)
    await engine.resume()
    before = await collect(engine.generate(wanted(engine)))
    await engine.pause(PauseMode.ABORT)
    await engine.release_memory()
    with pytest.raises(EngineStateError, match="restore it first"):
        await engine.resume()
    await engine.restore_memory()
    await engine.resume()
    after = await collect(engine.generate(wanted(engine)))
    assert after.token_ids == before.token_ids
    assert engine.weight_version == 3
