"""Sampling of every engine: ends, log-probs, seeds and invalid requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout.server.engines.engine import Engine, FinishReason, PauseMode
from tests.integration.rollout.server.engine_contract.engines import CONTEXT, SLOTS, wanted
from tests.lib.rollout.server.support import VOCAB, collect, recompute, request


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
