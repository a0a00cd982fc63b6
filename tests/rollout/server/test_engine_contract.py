"""What every engine does. Another engine proves itself by joining `ENGINES`.

SGLang joins with `pytest -m sglang`, as one server for the whole module that every test takes over.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.server.engine import (
    Engine,
    EngineFailed,
    EngineRequest,
    EngineStateError,
    FinishReason,
    PauseMode,
    VersionSource,
    WeightsError,
)
from rollout.server.engines import build_engine
from rollout.server.engines.fake import FakeEngine
from rollout.server.engines.sglang import SGLangEngine
from tests.rollout.server import sglang_server
from tests.rollout.server.support import (
    EOS,
    VOCAB,
    Output,
    collect,
    interrupted,
    recompute,
    request,
    save_model,
    settle,
)

SLOTS, CONTEXT, INTERVAL = 4, 400, 4
# SGLang takes prompts up to six tokens short of its context.
SGLANG_CONTEXT = CONTEXT + 6

Make = Callable[[Path, pytest.FixtureRequest], Engine]


def _fake(folder: Path, fixtures: pytest.FixtureRequest) -> Engine:
    return FakeEngine(
        vocab_size=VOCAB,
        max_context=CONTEXT,
        max_running=SLOTS,
        stream_interval=INTERVAL,
        mean_tokens=20,
    )


def _torch(folder: Path, fixtures: pytest.FixtureRequest) -> Engine:
    from rollout.server.engines.torch import TorchEngine

    return TorchEngine(folder, max_running=SLOTS, max_context=CONTEXT, stream_interval=INTERVAL)


def _sglang(folder: Path, fixtures: pytest.FixtureRequest) -> Engine:
    return SGLangEngine(folder, url=fixtures.getfixturevalue("sglang_url"))


ENGINES: dict[str, Make] = {"fake": _fake, "torch": _torch, "sglang": _sglang}
KINDS = [
    pytest.param("fake"),
    pytest.param("torch"),
    pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(600)]),
]


def wanted(
    engine: Engine, prefix: tuple[int, ...] = (3, 4, 5), **sampling: object
) -> EngineRequest:
    """A request whose output can be repeated: seeded, or greedy where there are no seeds."""
    fixed = {} if "seed" in engine.info.features else {"seed": None, "temperature": 0.0}
    return request(prefix, **(fixed | sampling))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of one model."""
    base = tmp_path_factory.mktemp("models")
    return save_model(base / "a", seed=1), save_model(base / "b", seed=2)


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sglang_server.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def sglang_url(folders: tuple[Path, Path]) -> Iterator[str]:
    """Where one SGLang listens, for all tests of the module."""
    config = sglang_server.sglang_config(
        folders[0], max_running=SLOTS, max_context=SGLANG_CONTEXT, stream_interval=INTERVAL
    )
    with sglang_server.sglang_server(config) as url:
        yield url


@pytest.fixture(params=KINDS)
async def engine(
    request: pytest.FixtureRequest, folders: tuple[Path, Path]
) -> AsyncIterator[Engine]:
    """A started engine of each kind."""
    engine = ENGINES[request.param](folders[0], request)
    await engine.start()
    yield engine
    await engine.close()


async def test_output_ends_at_max_new_tokens(engine: Engine) -> None:
    """A sequence that meets no stop id ends LENGTH with exactly its budget."""
    output = await collect(engine.generate(wanted(engine, max_new_tokens=21)))
    assert len(output.token_ids) == 21
    assert output.finish is FinishReason.LENGTH
    assert all(logprob <= 0 for logprob in output.logprobs)
    assert set(output.versions) == {0}


async def test_output_ends_at_the_context(engine: Engine) -> None:
    """Prompt and output together never exceed the context."""
    prefix = tuple(3 + i % 50 for i in range(CONTEXT - 5))
    output = await collect(engine.generate(wanted(engine, prefix, max_new_tokens=100)))
    assert len(output.token_ids) == 5
    assert output.finish is FinishReason.LENGTH


async def test_stop_id_is_the_last_token_of_the_output(engine: Engine) -> None:
    """The sampled stop token belongs to the output and ends it."""
    free = await collect(engine.generate(wanted(engine)))
    stop = free.token_ids[10]
    output = await collect(engine.generate(wanted(engine, stop_token_ids=(stop,))))
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert output.finish is FinishReason.STOP


async def test_eos_ends_the_output_unless_ignored(engine: Engine) -> None:
    """The model's own end of sequence stops a sequence that does not ignore it."""
    (eos,) = engine.info.eos_token_ids
    seed = 7 if "seed" in engine.info.features else None
    free: dict[str, Any] = {"max_new_tokens": 300, "temperature": 1.0, "seed": seed}
    ignoring = await collect(engine.generate(request(**free)))
    stopping = await collect(engine.generate(request(**free, ignore_eos=False)))
    assert (ignoring.finish, len(ignoring.token_ids)) == (FinishReason.LENGTH, 300)
    assert stopping.finish is FinishReason.STOP
    assert stopping.token_ids.index(eos) == len(stopping.token_ids) - 1
    if seed is not None:
        assert stopping.token_ids == ignoring.token_ids[: ignoring.token_ids.index(eos) + 1]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.9, "min_p": 0.02},
        {"temperature": 0.0},
    ],
)
async def test_logprobs_are_those_of_transformers(
    engine: Engine, folders: tuple[Path, Path], sampling: dict[str, Any]
) -> None:
    """Log-probs are after temperature and before top-p, top-k and min-p; greedy takes the best."""
    if engine.info.name == "fake":
        pytest.skip("no model")
    output = await collect(engine.generate(request(max_new_tokens=60, seed=None, **sampling)))
    temperature = sampling.get("temperature", 1.0)
    expected = recompute(folders[0], (3, 4, 5), output.token_ids, temperature)
    assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    if temperature == 0.0:
        assert (
            output.token_ids
            == (
                await collect(engine.generate(wanted(engine, max_new_tokens=60, temperature=0.0)))
            ).token_ids
        )


async def test_seed_is_kept_or_refused(engine: Engine) -> None:
    """An engine that cannot repeat a seeded output does not pretend to."""
    seeded = request(temperature=1.0, seed=11)
    if "seed" not in engine.info.features:
        with pytest.raises(ValueError, match="seed is 11"):
            await collect(engine.generate(seeded))
        return
    first, second = await collect(engine.generate(seeded)), await collect(engine.generate(seeded))
    assert first.token_ids == second.token_ids


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
        await collect(engine.generate(wanted(engine, prefix, **sampling)))
    assert len((await collect(engine.generate(wanted(engine)))).token_ids) == 32


async def test_closing_the_stream_ends_the_sequence(engine: Engine) -> None:
    """A closed iterator leaves nothing running or queued."""
    stream = engine.generate(wanted(engine, max_new_tokens=300))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await engine.pause(PauseMode.RETRACT)
    load = engine.load()
    assert (load.running, load.queued) == (0, 0)


async def test_more_requests_than_slots_all_finish(engine: Engine) -> None:
    """Sequences wait for a slot; each gets its own full output."""
    turns = [wanted(engine, (3 + i,), max_new_tokens=3 + 5 * i) for i in range(3 * SLOTS)]
    outputs = await asyncio.gather(*(collect(engine.generate(turn)) for turn in turns))
    assert [len(o.token_ids) for o in outputs] == [3 + 5 * i for i in range(3 * SLOTS)]


async def test_seeded_output_does_not_depend_on_the_company(engine: Engine) -> None:
    """The same seed and prefix give the same tokens alone and in a full batch."""
    alone = await collect(engine.generate(wanted(engine)))
    others = [request((9 + i,), seed=None, max_new_tokens=10 * (i + 1)) for i in range(6)]
    outputs = await asyncio.gather(
        *(collect(engine.generate(w)) for w in (*others[:2], wanted(engine), *others[2:]))
    )
    assert outputs[2].token_ids == alone.token_ids
    assert outputs[2].logprobs == pytest.approx(alone.logprobs, abs=1e-4)


async def test_retracting_pause_changes_nothing_but_time(engine: Engine) -> None:
    """A sequence paused and resumed several times gives the tokens of an undisturbed one."""
    turn = wanted(engine, max_new_tokens=200)
    expected = await collect(engine.generate(turn))
    output, pauses = await interrupted(engine, turn, PauseMode.RETRACT, times=3)
    assert pauses == 3
    assert output.token_ids == expected.token_ids
    assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


async def test_nothing_is_sampled_during_a_pause(engine: Engine) -> None:
    """When `pause` returns every token has been handed out, and no more come until `resume`."""
    output = Output()
    reader = asyncio.create_task(
        collect(engine.generate(wanted(engine, max_new_tokens=300)), output)
    )
    while not output.token_ids:
        await settle()
    await engine.pause(PauseMode.RETRACT)
    await settle()
    handed_out = len(output.token_ids)
    assert engine.load().running == 0
    assert engine.load().queued == 1
    waiting = asyncio.create_task(collect(engine.generate(wanted(engine))))
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
    turn = wanted(engine, max_new_tokens=200)
    expected = await collect(engine.generate(turn))
    output, pauses = await interrupted(engine, turn, PauseMode.ABORT, times=1)
    assert pauses == 1
    assert output.finish is FinishReason.INTERRUPTED
    assert 0 < len(output.token_ids) < 200
    rest = await collect(
        engine.generate(
            wanted(engine, (3, 4, 5, *output.token_ids), max_new_tokens=200 - len(output.token_ids))
        )
    )
    assert output.token_ids + rest.token_ids == expected.token_ids


async def test_requests_during_an_aborting_pause_end_at_once(engine: Engine) -> None:
    """Who arrives while a server leaves is told so immediately."""
    await engine.pause(PauseMode.ABORT)
    output = await collect(engine.generate(wanted(engine)))
    assert output.finish is FinishReason.INTERRUPTED
    assert output.token_ids == []
    await engine.resume()
    assert len((await collect(engine.generate(wanted(engine)))).token_ids) == 32


async def test_weight_update_splits_the_output_by_version(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """A sequence lives through an update; every token carries the version it was sampled under."""
    output = Output()
    async for chunk in engine.generate(wanted(engine, max_new_tokens=200)):
        output.add(chunk)
        if engine.weight_version == 0 and chunk.finish is None:
            await engine.pause(PauseMode.RETRACT)
            await engine.update_weights(folders[1], 5)
            await engine.resume()
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


async def test_pause_in_place_goes_on_where_it_stopped(engine: Engine) -> None:
    """Held in place, a sequence gives the tokens of an undisturbed one."""
    if "pause_in_place" not in engine.info.features:
        pytest.skip("the engine cannot pause in place")
    turn = wanted(engine, max_new_tokens=200)
    expected = await collect(engine.generate(turn))
    output, pauses = await interrupted(engine, turn, PauseMode.IN_PLACE, times=3)
    assert pauses == 3
    assert output.token_ids == expected.token_ids


async def test_update_in_place_labels_every_token(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """A turn that keeps its cache across an update has both versions; later turns are clean."""
    if "pause_in_place" not in engine.info.features:
        pytest.skip("the engine cannot pause in place")
    output = Output()
    async for chunk in engine.generate(wanted(engine, max_new_tokens=200)):
        output.add(chunk)
        if engine.weight_version == 0 and chunk.finish is None:
            await engine.pause(PauseMode.IN_PLACE)
            await engine.update_weights(folders[1], 5)
            await engine.resume()
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


async def test_closing_the_engine_ends_open_sequences(
    engine: Engine,
) -> None:
    """Open sequences end INTERRUPTED when the engine closes, so they can go on elsewhere."""
    output = Output()
    async for chunk in engine.generate(wanted(engine, max_new_tokens=300)):
        if not output.token_ids:
            await engine.close()
        output.add(chunk)
    assert output.finish is FinishReason.INTERRUPTED


def _mortal_sglang(folder: Path) -> Engine:
    return build_engine(
        sglang_server.sglang_config(
            folder, max_running=SLOTS, max_context=SGLANG_CONTEXT, stream_interval=INTERVAL
        )
    )


async def _broken() -> None:
    raise RuntimeError("the device fell off the bus")


def _kill(engine: Any) -> None:
    if isinstance(engine, FakeEngine):
        engine._step = _broken
    elif isinstance(engine, SGLangEngine):
        assert engine._process is not None
        os.killpg(engine._process._process.pid, signal.SIGKILL)
    else:
        engine._mailbox.post(lambda: asyncio.run(_broken()))


@pytest.mark.parametrize("kind", KINDS)
async def test_dead_engine_fails_its_turns_and_may_start_again(
    kind: str, folders: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    """A turn in flight and every later call raise EngineFailed; a new start is version 0 again."""
    own = _mortal_sglang(folders[0]) if kind == "sglang" else ENGINES[kind](folders[0], request)
    await own.start()
    try:
        before = await collect(own.generate(wanted(own)))
        await own.pause(PauseMode.RETRACT)
        await own.update_weights(folders[1], 3)
        await own.resume()
        turn = own.generate(wanted(own, max_new_tokens=300))
        await anext(turn)
        _kill(own)
        with pytest.raises(EngineFailed):
            await collect(turn)
        with pytest.raises(EngineFailed):
            await own.wait_failed()
        with pytest.raises(EngineFailed):
            await collect(own.generate(wanted(own)))
        if "restart" in own.info.features:
            await own.start()
            assert own.weight_version == 0
            assert (await collect(own.generate(wanted(own)))).token_ids == before.token_ids
    finally:
        await own.close()


def test_eos_of_the_tiny_model_is_what_the_suite_expects() -> None:
    """The support module and the suite agree on the end of sequence."""
    assert EOS == 1
