"""The engines of the contract, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import Engine, EngineRequest
from rollout.server.engines.fake import FakeEngine
from rollout.server.engines.sglang.sglang_engine import SGLangEngine
from tests.lib.rollout.server.support import VOCAB, request

SLOTS, CONTEXT, INTERVAL = 4, 400, 4
# SGLang takes prompts up to six tokens short of its context.
SGLANG_CONTEXT = CONTEXT + 6

Make = Callable[[Path, pytest.FixtureRequest], Engine]


def _fake(folder: Path, fixtures: pytest.FixtureRequest) -> Engine:
    config = RolloutServerConfig(
        fake_vocab_size=VOCAB,
        max_context=CONTEXT,
        max_running=SLOTS,
        stream_interval=INTERVAL,
        fake_mean_tokens=20,
    )
    return FakeEngine(config)


def _torch(folder: Path, fixtures: pytest.FixtureRequest) -> Engine:
    from rollout.server.engines.torch.torch_engine import TorchEngine

    return TorchEngine(
        RolloutServerConfig(
            model=folder, max_running=SLOTS, max_context=CONTEXT, stream_interval=INTERVAL
        )
    )


def _sglang(folder: Path, fixtures: pytest.FixtureRequest) -> Engine:
    return SGLangEngine(
        RolloutServerConfig(model=folder, sglang_url=fixtures.getfixturevalue("sglang_url"))
    )


ENGINES: dict[str, Make] = {"fake": _fake, "torch": _torch, "sglang": _sglang}
"""Another engine proves itself by joining."""
KINDS = [
    pytest.param("fake"),
    pytest.param("torch"),
    pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(600)]),
]


def make_engine(kind: str, folder: Path, fixtures: pytest.FixtureRequest) -> Engine:
    """An engine of this kind, not started."""
    return ENGINES[kind](folder, fixtures)


def wanted(
    engine: Engine, prefix: tuple[int, ...] = (3, 4, 5), **sampling: object
) -> EngineRequest:
    """A request whose output can be repeated: seeded, or greedy where there are no seeds."""
    fixed = {} if "seed" in engine.info.features else {"seed": None, "temperature": 0.0}
    return request(prefix, **(fixed | sampling))
