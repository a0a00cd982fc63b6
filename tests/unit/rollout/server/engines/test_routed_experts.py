"""The embedded engine reports which experts its routers chose, for every token exactly once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import PauseMode, RequestError
from rollout.server.engines.torch.torch_engine import TorchEngine
from services.lib.routed_experts import ExpertRecord
from tests.lib.rollout.server.routed_experts import (
    SHAPE,
    chosen,
    recorded,
    same_choices,
    save_experts,
    trained,
    whole,
)
from tests.lib.rollout.server.support import request, save_model

PROMPT = tuple(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts."""
    return save_experts(tmp_path_factory.mktemp("experts"))


async def test_every_token_has_what_transformers_chooses(folder: Path) -> None:
    """Prompts of several parts, prefixes that are copied, a pause, and requests for a part."""
    engine = TorchEngine(
        RolloutServerConfig(
            model=folder,
            max_running=3,
            stream_interval=4,
            prefill_tokens=16,
            record_routed_experts=True,
        )
    )
    await engine.start()
    wanted = [
        replace(request(PROMPT[: 5 + 8 * n], max_new_tokens=9 + n, seed=n), routed_from=first)
        for n, first in enumerate((0, 1, 7, 20, 37))
    ]
    running = [asyncio.create_task(recorded(engine.generate(each))) for each in wanted]
    await asyncio.sleep(0.02)
    await engine.pause(PauseMode.RETRACT)
    await engine.resume()
    found = await asyncio.gather(*running)
    await engine.close()
    model = trained(folder)
    for given, (ids, _, records) in zip(wanted, found, strict=True):
        sequence = [*given.token_ids, *ids]
        experts, first = whole(records, len(sequence)), max(given.routed_from or 0, 1)
        assert (experts[:first] == SHAPE.none).all()
        assert same_choices(experts[first:], chosen(model, sequence)[first:])
        assert sum(len(record.experts_TLK) for record in records) == len(sequence) - first
        assert not same_choices(experts[first:-1], chosen(model, sequence)[first + 1 :])  # control


async def test_nothing_is_reported_that_is_not_asked_for(folder: Path) -> None:
    """Neither by a request, nor by the setting; and no part that does not exist."""
    for records_experts, first in ((True, None), (False, 0)):
        engine = TorchEngine(
            RolloutServerConfig(model=folder, record_routed_experts=records_experts)
        )
        await engine.start()
        given = replace(request(PROMPT, max_new_tokens=3), routed_from=first)
        assert (await recorded(engine.generate(given)))[2] == []
        with pytest.raises(RequestError, match="routed_experts_from is 99"):
            await anext(engine.generate(replace(given, routed_from=99)))
        await engine.close()


async def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    """With the setting that asks for what it does not have."""
    engine = TorchEngine(
        RolloutServerConfig(model=save_model(tmp_path / "dense"), record_routed_experts=True)
    )
    with pytest.raises(
        ValueError, match=r"record_routed_experts is true: .* no module that routes"
    ):
        await engine.start()


def test_records_are_split_by_size_without_a_gap() -> None:
    """As messages of bounded size."""
    record = ExpertRecord(start=3, experts_TLK=np.arange(28, dtype=np.uint8).reshape(7, 2, 2))
    parts = record.parts(9)
    assert [(part.start, len(part.experts_TLK)) for part in parts] == [
        (3, 2),
        (5, 2),
        (7, 2),
        (9, 1),
    ]
    assert (np.concatenate([part.experts_TLK for part in parts]) == record.experts_TLK).all()
