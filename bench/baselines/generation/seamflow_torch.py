"""Our embedded engine, through the engine protocol: all requests at once from one event loop.

A driver: see `bench.baselines.generation.workload`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.baselines.generation.workload import Case, serve
from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import EngineRequest, Sampling
from rollout.server.engines.torch.torch_engine import TorchEngine


class _Engine:
    """An engine and the loop it lives in."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = TorchEngine(
            RolloutServerConfig(model=folder, max_running=rows, max_context=640)
        )
        self.loop.run_until_complete(self.engine.start())


async def _sample(engine: TorchEngine, prompt: list[int], length: int) -> None:
    sampling = Sampling(max_new_tokens=length, ignore_eos=True)
    asked = EngineRequest(request_id="bench", token_ids=tuple(prompt), sampling=sampling)
    sampled = 0
    async for chunk in engine.generate(asked):
        sampled += len(chunk.logprobs)
    assert sampled == length


def load(folder: Path, rows: int) -> _Engine:
    """Start an engine of `rows` rows."""
    return _Engine(folder, rows)


def generate(model: _Engine, case: Case) -> None:
    """Sample every request of `case`, with log-probs."""

    async def all_of_them() -> None:
        pairs = zip(case.prompts, case.lengths, strict=True)
        await asyncio.gather(*(_sample(model.engine, *pair) for pair in pairs))

    model.loop.run_until_complete(all_of_them())


if __name__ == "__main__":
    serve(load, generate)
