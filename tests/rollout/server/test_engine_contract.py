"""What every engine does. Another engine proves itself by joining `ENGINES`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.server.engine import (
    Engine,
    EngineStateError,
    FinishReason,
    PauseMode,
    WeightsError,
)
from rollout.server.engines.fake import FakeEngine
from rollout.server.engines.torch import TorchEngine
from tests.rollout.server.support import (
    EOS,
    VOCAB,
    Output,
    collect,
    interrupted,
    request,
    save_model,
    settle,
)

SLOTS, CONTEXT, INTERVAL = 4, 400, 4


def _fake(folder: Path) -> Engine:
    return FakeEngine(
        vocab_size=VOCAB,
        max_context=CONTEXT,
        max_running=SLOTS,
        stream_interval=INTERVAL,
        mean_tokens=20,
    )


def _torch(folder: Path) -> Engine:
    return TorchEngine(folder, max_running=SLOTS, max_context=CONTEXT, stream_interval=INTERVAL)


ENGINES: dict[str, Callable[[Path], Engine]] = {"fake": _fake, "torch": _torch}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of one model."""
    base = tmp_path_factory.mktemp("models")
    return save_model(base / "a", seed=1), save_model(base / "b", seed=2)


@pytest.fixture(params=sorted(ENGINES))
async def engine(
    request: pytest.FixtureRequest, folders: tuple[Path, Path]
) -> AsyncIterator[Engine]:
    """A started engine of each kind."""
    engine = ENGINES[request.param](folders[0])
    await engine.start()
    yield engine
    await engine.close()


async def test_output_ends_at_max_new_tokens(engine: Engine) -> None:
    """A sequence that meets no stop id ends LENGTH with exactly its budget."""
    output = await collect(engine.generate(request(max_new_tokens=21)))
    assert len(output.token_ids) == 21
    assert output.finish is FinishReason.LENGTH
    assert all(logprob <= 0 for logprob in output.logprobs)
    assert set(output.versions) == {0}


async def test_output_ends_at_the_context(engine: Engine) -> None:
    """Prompt and output together never exceed the context."""
    prefix = tuple(3 + i % 50 for i in range(CONTEXT - 5))
    output = await collect(engine.generate(request(prefix, max_new_tokens=100)))
    assert len(output.token_ids) == 5
    assert output.finish is FinishReason.LENGTH


async def test_stop_id_is_the_last_token_of_the_output(engine: Engine) -> None:
    """The sampled stop token belongs to the output and ends it."""
    free = await collect(engine.generate(request()))
    stop = free.token_ids[10]
    output = await collect(engine.generate(request(stop_token_ids=(stop,))))
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert output.finish is FinishReason.STOP


async def test_eos_ends_the_output_unless_ignored(engine: Engine) -> None:
    """The model's own end of sequence stops a sequence that does not ignore it."""
    (eos,) = engine.info.eos_token_ids
    wanted: dict[str, Any] = {"max_new_tokens": 300, "temperature": 1.0}
    ignoring = await collect(engine.generate(request(**wanted)))
    stopping = await collect(engine.generate(request(**wanted, ignore_eos=False)))
    assert eos in ignoring.token_ids
    assert stopping.token_ids == ignoring.token_ids[: ignoring.token_ids.index(eos) + 1]
    assert stopping.finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("prefix", "sampling", "names"),
    [
        ((), {}, "length of token_ids is 0"),
        ((3, VOCAB), {}, rf"token_ids\[1\] is {VOCAB}.*{VOCAB - 1}"),
        ((3, -1), {}, r"token_ids\[1\] is -1"),
        ((3,) * CONTEXT, {}, f"length of token_ids is {CONTEXT}.*{CONTEXT - 1}"),
        ((3,), {"temperature": -0.1}, "temperature is -0.1"),
        ((3,), {"temperature": 1e-30}, "temperature is 1e-30"),
        ((3,), {"temperature": float("nan")}, "temperature is nan"),
        ((3,), {"top_p": 0.0}, "top_p is 0.0"),
        ((3,), {"top_k": -1}, "top_k is -1"),
        ((3,), {"min_p": 1.5}, "min_p is 1.5"),
        ((3,), {"min_p": float("nan")}, "min_p is nan"),
        ((3,), {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ((3,), {"stop_token_ids": (VOCAB,)}, rf"stop_token_ids\[0\] is {VOCAB}"),
    ],
)
async def test_bad_request_is_refused_by_name(
    engine: Engine, prefix: tuple[int, ...], sampling: dict[str, object], names: str
) -> None:
    """A request the engine cannot sample raises ValueError naming field, value and bound."""
    with pytest.raises(ValueError, match=names):
        await collect(engine.generate(request(prefix, **sampling)))
    assert len((await collect(engine.generate(request()))).token_ids) == 32


async def test_closing_the_stream_ends_the_sequence(engine: Engine) -> None:
    """A closed iterator leaves nothing running or queued."""
    stream = engine.generate(request(max_new_tokens=300))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await engine.pause(PauseMode.RETRACT)
    load = engine.load()
    assert (load.running, load.queued) == (0, 0)


async def test_more_requests_than_slots_all_finish(engine: Engine) -> None:
    """Sequences wait for a slot; each gets its own full output."""
    wanted = [request((3 + i,), max_new_tokens=3 + 5 * i) for i in range(3 * SLOTS)]
    outputs = await asyncio.gather(*(collect(engine.generate(w)) for w in wanted))
    assert [len(o.token_ids) for o in outputs] == [3 + 5 * i for i in range(3 * SLOTS)]


async def test_seeded_output_does_not_depend_on_the_company(engine: Engine) -> None:
    """The same seed and prefix give the same tokens alone and in a full batch."""
    alone = await collect(engine.generate(request()))
    others = [request((9 + i,), seed=i, max_new_tokens=10 * (i + 1)) for i in range(6)]
    outputs = await asyncio.gather(
        *(collect(engine.generate(w)) for w in (*others[:2], request(), *others[2:]))
    )
    assert outputs[2].token_ids == alone.token_ids
    assert outputs[2].logprobs == pytest.approx(alone.logprobs, abs=1e-4)


async def test_retracting_pause_changes_nothing_but_time(engine: Engine) -> None:
    """A sequence paused and resumed several times gives the tokens of an undisturbed one."""
    wanted = request(max_new_tokens=200)
    expected = await collect(engine.generate(wanted))
    output, pauses = await interrupted(engine, wanted, PauseMode.RETRACT, times=3)
    assert pauses == 3
    assert output.token_ids == expected.token_ids
    assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


async def test_nothing_is_sampled_during_a_pause(engine: Engine) -> None:
    """When `pause` returns every token has been handed out, and no more come until `resume`."""
    output = Output()
    reader = asyncio.create_task(collect(engine.generate(request(max_new_tokens=300)), output))
    while not output.token_ids:
        await settle()
    await engine.pause(PauseMode.RETRACT)
    await settle()
    handed_out = len(output.token_ids)
    assert engine.load().running == 0
    assert engine.load().queued == 1
    waiting = asyncio.create_task(collect(engine.generate(request())))
    await engine.pause(PauseMode.RETRACT)
    await settle()
    assert len(output.token_ids) == handed_out
    assert not waiting.done()
    await engine.resume()
    await reader
    assert len(output.token_ids) == 300
    assert len((await waiting).token_ids) == 32


async def test_aborting_pause_gives_sequences_up_with_what_they_have(engine: Engine) -> None:
    """An aborted sequence ends INTERRUPTED; continuing it gives what it would have given."""
    wanted = request(max_new_tokens=200)
    expected = await collect(engine.generate(wanted))
    output, pauses = await interrupted(engine, wanted, PauseMode.ABORT, times=1)
    assert pauses == 1
    assert output.finish is FinishReason.INTERRUPTED
    assert 0 < len(output.token_ids) < 200
    rest = await collect(
        engine.generate(
            request((3, 4, 5, *output.token_ids), max_new_tokens=200 - len(output.token_ids))
        )
    )
    assert output.token_ids + rest.token_ids == expected.token_ids


async def test_requests_during_an_aborting_pause_end_at_once(engine: Engine) -> None:
    """Who arrives while a server leaves is told so immediately."""
    await engine.pause(PauseMode.ABORT)
    output = await collect(engine.generate(request()))
    assert output.finish is FinishReason.INTERRUPTED
    assert output.token_ids == []
    await engine.resume()
    assert len((await collect(engine.generate(request()))).token_ids) == 32


async def test_weight_update_splits_the_output_by_version(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """A sequence lives through an update; every token carries the version it was sampled under."""
    output = Output()
    async for chunk in engine.generate(request(max_new_tokens=200)):
        output.add(chunk)
        if engine.weight_version == 0 and chunk.finish is None:
            await engine.pause(PauseMode.RETRACT)
            await engine.update_weights(folders[1], 5)
            await engine.resume()
    assert len(output.token_ids) == 200
    switch = output.versions.index(5)
    assert output.versions == [0] * switch + [5] * (200 - switch)
    prefix = (3, 4, 5, *output.token_ids[:switch])
    fresh = await collect(engine.generate(request(prefix, max_new_tokens=200 - switch)))
    assert fresh.token_ids == output.token_ids[switch:]


async def test_weight_update_needs_a_pause(engine: Engine, folders: tuple[Path, Path]) -> None:
    """Weights never change under a running sequence."""
    with pytest.raises(EngineStateError, match="pause it first"):
        await engine.update_weights(folders[1], 1)
    assert engine.weight_version == 0


async def test_missing_weights_leave_the_old_ones(engine: Engine, tmp_path: Path) -> None:
    """A folder that cannot be loaded changes neither version nor output."""
    before = await collect(engine.generate(request()))
    await engine.pause(PauseMode.RETRACT)
    with pytest.raises(WeightsError, match="no such folder"):
        await engine.update_weights(tmp_path / "absent", 1)
    await engine.resume()
    assert engine.weight_version == 0
    assert (await collect(engine.generate(request()))).token_ids == before.token_ids


async def test_released_memory_comes_back_with_the_last_weights(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """Release needs a pause, refuses to resume, and restore brings back what was loaded last."""
    with pytest.raises(EngineStateError, match="pause it first"):
        await engine.release_memory()
    await engine.pause(PauseMode.RETRACT)
    await engine.update_weights(folders[1], 3)
    await engine.resume()
    before = await collect(engine.generate(request()))
    await engine.pause(PauseMode.ABORT)
    await engine.release_memory()
    with pytest.raises(EngineStateError, match="restore it first"):
        await engine.resume()
    await engine.restore_memory()
    await engine.resume()
    after = await collect(engine.generate(request()))
    assert after.token_ids == before.token_ids
    assert engine.weight_version == 3


async def test_closing_the_engine_ends_open_sequences(
    engine: Engine,
) -> None:
    """Open sequences end INTERRUPTED when the engine closes, so they can go on elsewhere."""
    output = Output()
    async for chunk in engine.generate(request(max_new_tokens=300)):
        if not output.token_ids:
            await engine.close()
        output.add(chunk)
    assert output.finish is FinishReason.INTERRUPTED


def test_eos_of_the_tiny_model_is_what_the_suite_expects() -> None:
    """The support module and the suite agree on the end of sequence."""
    assert EOS == 1
