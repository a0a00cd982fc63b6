"""An engine on a device: decoding beside memory bandwidth, a swap beside sampling, a lending.

A process of its own, which ends with a line of JSON: figures by name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.gpu.device_speed import bytes_per_second
from rollout.server.config import RolloutServerConfig
from rollout.server.engines import build_engine
from rollout.server.engines.engine import Engine, EngineRequest, PauseMode, Sampling
from tools.plan.engine_size import EngineSize, engine_size

ROWS = {"cuda": (1, 16, 64, 256), "cpu": (1, 4)}
"""Sequences at a time."""
_PROMPT = 32
_LENGTHS = {"cuda": (64, 320), "cpu": (8, 40)}
"""Tokens of a short and of a long answer: their difference is decoding alone."""
_LONG = {"cuda": 100_000, "cpu": 10_000}
"""Tokens that none of the sequences beside a swap reaches."""


async def engine_figures(config: RolloutServerConfig, device: str) -> dict[str, float]:
    """Measure a configured engine, which has the device for itself.

    Args:
        config: of the rollout server; `model` is set.
        device: "cuda" or "cpu".
    """
    assert config.model is not None
    engine = build_engine(config)
    size, bandwidth = engine_size(config.model), bytes_per_second(device)
    await engine.start()
    try:
        decoded: dict[str, float] = {}
        for rows in ROWS[device]:
            decoded |= await _decode(engine, size, bandwidth, rows, device)
        return {
            **decoded,
            **await _swap(engine, config.model, device),
            **await _lending(engine, config.model),
        }
    finally:
        await engine.close()


async def _decode(
    engine: Engine, size: EngineSize, bandwidth: float, rows: int, device: str
) -> dict[str, float]:
    short, long = _LENGTHS[device]
    seconds = [await _seconds(engine, rows, length) for length in (short, short, long)][1:]
    steps_per_second = (long - short) / (seconds[1] - seconds[0])
    context = _PROMPT + (short + long) / 2
    factor = 1 if device == "cuda" else 2  # float32 instead of bfloat16
    read = factor * (size.bytes_of_step(rows) + rows * context * size.kv_bytes)
    return {
        f"decoded_tokens_per_second_{rows}": rows * steps_per_second,
        f"decode_over_bandwidth_{rows}": read * steps_per_second / bandwidth,
    }


async def _seconds(engine: Engine, rows: int, length: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(_sample(engine, row, length) for row in range(rows)))
    return time.perf_counter() - began


async def _sample(
    engine: Engine, row: int, length: int, counts: Sequence[list[float]] = ()
) -> None:
    """Sample one sequence; each list of `counts` gets the time of each token."""
    prompt = tuple((row + place) % engine.info.vocab_size for place in range(_PROMPT))
    sampling = Sampling(max_new_tokens=length, ignore_eos=True)
    request = EngineRequest(request_id=f"row-{row}", token_ids=prompt, sampling=sampling)
    async for chunk in engine.generate(request):
        for times in counts:
            times.extend([time.perf_counter()] * len(chunk.token_ids))


async def _swap(engine: Engine, model: Path, device: str) -> dict[str, float]:
    """Load other weights while sequences are sampled: what of it they do not notice."""
    rows, times = ROWS[device][-1], list[float]()
    longest = min(_LONG[device], engine.info.max_context - _PROMPT)
    running = [asyncio.ensure_future(_sample(engine, row, longest, [times])) for row in range(rows)]
    while not times:
        await asyncio.sleep(0.01)
    try:
        with TemporaryDirectory() as folder:
            other = Path(shutil.copytree(model, Path(folder) / "weights"))
            return await _timed_swap(engine, other, times)
    finally:
        for task in running:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _timed_swap(engine: Engine, folder: Path, times: list[float]) -> dict[str, float]:
    before = time.perf_counter()
    await asyncio.sleep(1)
    began = time.perf_counter()
    await engine.prepare_weights(folder)
    prepared = time.perf_counter()
    await engine.pause(PauseMode.RETRACT)
    await engine.update_weights(folder, 1)
    await engine.resume()
    swapped = time.perf_counter()
    rates = [_rate(times, *span) for span in ((before, began), (began, prepared))]
    return {
        "weights_prepare_seconds": prepared - began,
        "weights_swap_seconds": swapped - prepared,
        "weights_hidden_share": (prepared - began) / (swapped - began),
        "sampling_beside_prepare": rates[1] / rates[0],
    }


def _rate(times: Sequence[float], begin: float, end: float) -> float:
    """Tokens a second in a span of time."""
    return sum(begin <= each < end for each in times) / (end - begin)


async def _lending(engine: Engine, model: Path) -> dict[str, float]:
    await engine.pause(PauseMode.RETRACT)
    began = time.perf_counter()
    freed = await engine.release_memory()
    released = time.perf_counter()
    await engine.restore_memory(model, 2)
    restored = time.perf_counter()
    await engine.resume()
    return {
        "engine_released_gb": freed / 1e9,
        "engine_release_seconds": released - began,
        "engine_restore_seconds": restored - released,
    }


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True, help="settings as JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    given = parser.parse_args()
    text = given.config.read_text(encoding="utf-8")
    config = RolloutServerConfig.model_validate_json(text)
    torch.set_num_threads(config.threads)
    print(json.dumps(asyncio.run(engine_figures(config, given.device))), flush=True)


if __name__ == "__main__":
    _main()
