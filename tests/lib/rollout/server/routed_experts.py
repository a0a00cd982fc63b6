"""Tiny mixtures of experts, and what their routers choose by transformers alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM

from rollout.server.engines.engine import Chunk
from services.lib.routed_experts import ExpertRecord, RoutingShape, read_records
from services.lib.transformer.routers import prepare_routers, recording, replaying
from tests.lib.rollout.server.support import EOS, VOCAB, save_model
from tests.suites.field.tiny_models import make_config, make_model

SHAPE = RoutingShape(2, 2, 8)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "num_experts": SHAPE.num_experts,
    "num_experts_per_tok": SHAPE.num_chosen,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "bos_token_id": 2,
    "pad_token_id": 0,
}


def save_experts(folder: Path, seed: int = 0) -> Path:
    """Save a Qwen3-MoE of random weights: two layers of 8 experts, of which a token passes two."""
    save_model(folder)  # its tokenizer
    make_model(make_config("qwen3_moe", **_SIZES), seed).save_pretrained(folder)  # type: ignore[operator]
    return folder


def trained(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model as the trainer has it, its routers prepared."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert prepare_routers(model) == SHAPE
    return model


@torch.no_grad()
def chosen(model: nn.Module, token_ids: Sequence[int]) -> NDArray[Any]:
    """The records of a sequence by the model itself, [T, L, K]; that of the first token is none."""
    experts = SHAPE.empty(len(token_ids))

    def take(layer: int, chosen_nk: torch.Tensor) -> None:
        experts[1:, layer] = chosen_nk[:-1].numpy()

    with recording(take):
        model(torch.tensor([token_ids]))
    return experts


@torch.no_grad()
def logprobs(
    model: nn.Module, token_ids: Sequence[int], experts: NDArray[Any] | None = None
) -> torch.Tensor:
    """Log-probs of the tokens after the first one, with or without replay."""
    replayed = None
    if experts is not None:
        after = np.append(experts[1:], SHAPE.empty(1), axis=0).astype(np.int16)
        replayed = torch.from_numpy(np.where(after == SHAPE.none, -1, after))
    with replaying(replayed):
        found = model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)
    picked: torch.Tensor = found.gather(1, torch.tensor(token_ids)[1:, None])[:, 0]
    return picked


async def recorded(
    stream: AsyncIterator[Chunk],
) -> tuple[list[int], list[float], list[ExpertRecord]]:
    """The tokens, log-probs and records of one sequence."""
    ids: list[int] = []
    values: list[float] = []
    records = []
    async for chunk in stream:
        ids += chunk.token_ids
        values += chunk.logprobs
        if chunk.routed is not None:
            records.append(chunk.routed)
    return ids, values, records


def whole(records: Sequence[ExpertRecord], num_tokens: int) -> NDArray[Any]:
    """The records as one array over the sequence."""
    return read_records([record.message() for record in records], SHAPE, num_tokens)


def same_choices(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether the same experts are chosen, in any order."""
    return bool((np.sort(one, -1) == np.sort(other, -1)).all())
