"""The embedded engine computes what plain transformers computes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import EngineFailed, EngineRequest, PauseMode, WeightsError
from rollout.server.engines.torch.batch import Batch
from rollout.server.engines.torch.prefix_cache import _prefixes
from rollout.server.engines.torch.row_model import Step
from rollout.server.engines.torch.torch_engine import TorchEngine
from tests.lib.rollout.server.support import (
    ARCHITECTURES,
    Output,
    collect,
    interrupted,
    recompute,
    request,
    save_model,
)


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Two versions of one model, for each architecture."""
    base = tmp_path_factory.mktemp(request.param)
    return save_model(base / "a", request.param, 1), save_model(base / "b", request.param, 2)


@pytest.fixture
async def engine(folders: tuple[Path, Path]) -> AsyncIterator[TorchEngine]:
    """A started engine on the first version."""
    engine = TorchEngine(RolloutServerConfig(model=folders[0], max_running=6, stream_interval=4))
    await engine.start()
    yield engine
    await engine.close()


def _mixed_requests() -> list[EngineRequest]:
    """Prompts, lengths and sampling of every kind, more than there are rows."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.2},
        {"temperature": 0.5, "top_k": 9, "top_p": 0.9, "seed": None},
    ]
    return [
        request(
            tuple(3 + (i * 7 + j) % 60 for j in range(1 + 9 * i)),
            **kinds[i % len(kinds)],
            max_new_tokens=5 + 11 * (i % 7),
        )
        for i in range(14)
    ]


async def test_logprobs_equal_transformers(engine: TorchEngine, folders: tuple[Path, Path]) -> None:
    """Log-probs of a mixed, overfull batch equal one plain forward pass each to 1e-5."""
    wanted = _mixed_requests()
    outputs = await asyncio.gather(*(collect(engine.generate(w)) for w in wanted))
    for asked, output in zip(wanted, outputs, strict=True):
        expected = recompute(
            folders[0], asked.token_ids, output.token_ids, asked.sampling.temperature
        )
        assert torch.allclose(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)


@pytest.fixture
def prefilled(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Length of each part prefilled from now on; `clear()` it to count from later."""
    lengths: list[int] = []
    rows = engine._model.rows
    forward = rows.forward

    def counting(step: Step) -> torch.Tensor | None:
        lengths.extend(len(part.token_ids) for part in step.parts)
        return forward(step)

    monkeypatch.setattr(rows, "forward", counting)
    return lengths


async def test_samples_of_one_prompt_prefill_it_once(
    engine: TorchEngine, folders: tuple[Path, Path], prefilled: list[int]
) -> None:
    """Those that begin together and those that find it running copy it; all are right."""
    prompt = tuple(3 + i % 50 for i in range(40))
    # More than there are rows, and of different lengths: some begin while others run.
    wanted = [request(prompt, seed=i, max_new_tokens=20 + 7 * i) for i in range(9)]
    await engine.pause(PauseMode.RETRACT)
    calls = [asyncio.create_task(collect(engine.generate(w))) for w in wanted]
    while engine.load().queued < len(wanted):
        await asyncio.sleep(0)
    await engine.resume()
    outputs = await asyncio.gather(*calls)
    assert prefilled == [len(prompt) - 1]
    assert len({tuple(output.token_ids[:20]) for output in outputs}) > 1
    for asked, output in zip(wanted, outputs, strict=True):
        expected = recompute(folders[0], prompt, output.token_ids, asked.sampling.temperature)
        assert torch.allclose(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)


async def test_turns_of_one_conversation_prefill_what_is_new(
    engine: TorchEngine, folders: tuple[Path, Path], prefilled: list[int]
) -> None:
    """A turn copies all that earlier turns have cached; another branch, what it has in common."""
    first = request(tuple(range(3, 43)), max_new_tokens=30)
    output = await collect(engine.generate(first))
    # Of the last token sampled nothing is cached: no step has fed it.
    turn = (*first.token_ids, *output.token_ids, 50, 51, 52)
    branch = (*first.token_ids[:35], 60, 61)
    for prefix, new in ((turn, 3), (branch, 1)):
        prefilled.clear()
        sampled = await collect(engine.generate(request(prefix, max_new_tokens=9)))
        expected = recompute(folders[0], prefix, sampled.token_ids)
        assert torch.allclose(torch.tensor(sampled.logprobs), expected, atol=1e-5, rtol=0)
        assert prefilled == [new]


async def test_a_prefix_of_a_running_sequence_is_copied(
    engine: TorchEngine, folders: tuple[Path, Path], prefilled: list[int]
) -> None:
    """Also one that goes into what it sampled."""
    first, output = request(tuple(range(3, 20)), max_new_tokens=100), Output()
    chunks = engine.generate(first)
    assert isinstance(chunks, AsyncGenerator)
    while len(output.token_ids) < 8:
        output.add(await anext(chunks))
    prefilled.clear()
    inside = (*first.token_ids, *output.token_ids[:5], 7)
    sampled = await collect(engine.generate(request(inside, max_new_tokens=3)))
    expected = recompute(folders[0], inside, sampled.token_ids)
    assert torch.allclose(torch.tensor(sampled.logprobs), expected, atol=1e-5, rtol=0)
    assert prefilled == []
    await chunks.aclose()


async def test_a_wrong_copy_would_be_noticed(
    engine: TorchEngine, folders: tuple[Path, Path], prefilled: list[int]
) -> None:
    """Negative control: with what is cached of another prompt, log-probs are not transformers'."""
    await collect(engine.generate(request(tuple(range(3, 43)))))
    index = engine._decoder._batch._prefixes  # type: ignore[union-attr]
    entry = next(iter(index._ended))
    entry.token_ids[:32] = prefix = list(range(13, 45))
    for key, length in _prefixes(prefix, 32):
        entry.lengths[key] = length
        index._entries[key] = entry
    prefilled.clear()
    asked = (*prefix, 9, 8)
    sampled = await collect(engine.generate(request(asked)))
    assert prefilled == [1]
    expected = recompute(folders[0], asked, sampled.token_ids)
    assert not torch.allclose(torch.tensor(sampled.logprobs), expected, atol=1e-3, rtol=0)


async def test_new_weights_drop_what_was_cached(
    engine: TorchEngine, folders: tuple[Path, Path], prefilled: list[int]
) -> None:
    """A prompt seen under the old weights is prefilled in full under the new ones."""
    asked = request(tuple(range(3, 43)))
    await collect(engine.generate(asked))
    await engine.pause(PauseMode.RETRACT)
    await engine.prepare_weights(folders[1])
    await engine.update_weights(folders[1], 1)
    await engine.resume()
    prefilled.clear()
    output = await collect(engine.generate(asked))
    assert prefilled == [len(asked.token_ids) - 1]
    expected = recompute(folders[1], asked.token_ids, output.token_ids)
    assert torch.allclose(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)


async def test_a_long_prompt_is_prefilled_in_parts(folders: tuple[Path, Path]) -> None:
    """No step prefills more than it may, others decode in between, and all log-probs are right."""
    engine = TorchEngine(RolloutServerConfig(model=folders[0], max_running=6, prefill_tokens=16))
    await engine.start()
    steps: list[tuple[int, int]] = []
    rows = engine._model.rows
    forward = rows.forward

    def counting(step: Step) -> torch.Tensor | None:
        steps.append((len(step.slots), sum(len(part.token_ids) for part in step.parts)))
        return forward(step)

    rows.forward = counting  # type: ignore[method-assign]
    wanted = [
        request((9, 9), max_new_tokens=80),
        request(tuple(3 + i * i % 60 for i in range(200)), max_new_tokens=20),
        request(tuple(3 + i * i % 59 for i in range(33)), max_new_tokens=20),
    ]
    outputs = await asyncio.gather(*(collect(engine.generate(w)) for w in wanted))
    await engine.close()
    assert max(prefilled for _, prefilled in steps) == 16
    assert sum(1 for decoding, prefilled in steps if decoding and prefilled) >= 10
    for asked, output in zip(wanted, outputs, strict=True):
        expected = recompute(folders[0], asked.token_ids, output.token_ids)
        assert torch.allclose(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)


async def test_prepared_weights_are_not_read_again(
    engine: TorchEngine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """What was prepared is what is swapped in, also when its folder has gone since."""
    folder = tmp_path / "new"
    folder.mkdir()
    shutil.copy(folders[1] / "model.safetensors", folder)
    await engine.prepare_weights(folder)
    (folder / "model.safetensors").unlink()
    await engine.pause(PauseMode.RETRACT)
    await engine.update_weights(folder, 1)
    await engine.resume()
    asked = request()
    output = await collect(engine.generate(asked))
    expected = recompute(folders[1], asked.token_ids, output.token_ids)
    assert torch.allclose(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)


async def test_greedy_tokens_are_the_likeliest(
    engine: TorchEngine, folders: tuple[Path, Path]
) -> None:
    """Temperature 0 takes the argmax of the plain forward pass at every position."""
    asked = request(temperature=0.0, max_new_tokens=60)
    output = await collect(engine.generate(asked))
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*asked.token_ids, *output.token_ids]])).logits[0]
    assert logits.argmax(-1)[len(asked.token_ids) - 1 : -1].tolist() == output.token_ids


@pytest.mark.parametrize("times", [1, 4])
async def test_greedy_interrupted_equals_uninterrupted(engine: TorchEngine, times: int) -> None:
    """A greedy turn interrupted k times gives the same tokens, log-probs to 1e-5."""
    wanted = request(temperature=0.0, max_new_tokens=150)
    expected = await collect(engine.generate(wanted))
    others = [asyncio.create_task(collect(engine.generate(w))) for w in _mixed_requests()[:3]]
    output, pauses = await interrupted(engine, wanted, PauseMode.RETRACT, times)
    await asyncio.gather(*others)
    assert pauses == times
    assert output.token_ids == expected.token_ids
    assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


async def test_every_span_recomputes_under_the_version_it_claims(
    engine: TorchEngine, folders: tuple[Path, Path]
) -> None:
    """Across updates a span's log-probs are those of its version's weights, and of no other's."""
    wanted = request(max_new_tokens=120)
    output = Output()
    async for chunk in engine.generate(wanted):
        output.add(chunk)
        if chunk.finish is None and chunk.weight_version == engine.weight_version < 3:
            version = engine.weight_version + 1
            await engine.pause(PauseMode.RETRACT)
            await engine.update_weights(folders[version % 2], version)
            await engine.resume()
    assert sorted(set(output.versions)) == [0, 1, 2, 3]
    given = torch.tensor(output.logprobs)
    by_folder = [recompute(f, wanted.token_ids, output.token_ids) for f in folders]
    claimed = torch.tensor(output.versions) % 2
    right = torch.where(claimed == 0, by_folder[0], by_folder[1])
    wrong = torch.where(claimed == 0, by_folder[1], by_folder[0])
    assert torch.allclose(given, right, atol=1e-3, rtol=0)
    # Negative control: the check can tell the two versions apart.
    assert not torch.allclose(given, wrong, atol=1e-3, rtol=0)


async def test_the_longest_prompt_is_served(
    engine: TorchEngine, folders: tuple[Path, Path]
) -> None:
    """A prompt one short of the context, whose padding reaches past it, gives one right token."""
    prefix = tuple(3 + i % 60 for i in range(engine.info.max_context - 1))
    output = await collect(engine.generate(request(prefix)))
    expected = recompute(folders[0], prefix, output.token_ids)
    assert torch.allclose(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)
    assert len(output.token_ids) == 1


async def test_released_memory_is_counted(engine: TorchEngine, folders: tuple[Path, Path]) -> None:
    """Release reports at least the bytes of the weights, and a second release nothing."""
    await collect(engine.generate(request()))
    await engine.pause(PauseMode.RETRACT)
    weights = sum(tensor.nbytes for tensor in load_file(folders[0] / "model.safetensors").values())
    assert await engine.release_memory() > weights
    assert await engine.release_memory() == 0
    await engine.restore_memory()


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape", "nan", "truncated"])
async def test_bad_weights_are_named_and_leave_the_old_ones(
    engine: TorchEngine, folders: tuple[Path, Path], tmp_path: Path, damage: str
) -> None:
    """A checkpoint that does not fit raises WeightsError and not one parameter changes."""
    tensors = load_file(folders[1] / "model.safetensors")
    name = next(name for name in sorted(tensors) if "ln" in name or "norm" in name)
    if damage == "missing":
        del tensors[name]
    elif damage == "unexpected":
        tensors["another.weight"] = torch.ones(2)
    elif damage == "shape":
        tensors[name] = torch.ones(3)
    elif damage == "nan":
        tensors[name][0] = float("nan")
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    before = await collect(engine.generate(request()))
    await engine.pause(PauseMode.RETRACT)
    culprit = {"unexpected": "another.weight", "truncated": "model.safetensors"}.get(damage, name)
    with pytest.raises(WeightsError, match=culprit.replace(".", r"\.")):
        await engine.update_weights(tmp_path, 1)
    await engine.resume()
    after = await collect(engine.generate(request()))
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert engine.weight_version == 0


async def test_a_dead_engine_says_so(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a step raises, open and later calls and `wait_failed` raise EngineFailed saying why."""

    def broken(_batch: Batch, _prefill_tokens: int) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Batch, "step", broken)
    for _ in range(2):
        with pytest.raises(EngineFailed, match="out of luck"):
            await collect(engine.generate(request()))
    with pytest.raises(EngineFailed, match="out of luck"):
        await engine.pause(PauseMode.RETRACT)
    with pytest.raises(EngineFailed, match="out of luck"):
        await engine.wait_failed()
