"""Rows of mixed lengths of every rope type: each is computed as if it were alone.

The right values are transformers': the forward pass of one row by a model just made. For a token
that an engine samples, it is the pass over the tokens before it.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bench.harness.byte_model import make_byte_model
from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import EngineRequest, Sampling
from rollout.server.engines.torch.torch_engine import TorchEngine
from services.lib.transformer.can_pack import can_pack
from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row
from services.scoring.scorers.logprobs import LogProbs
from tests.lib.trainer.model.whole_rows import whole_rows
from tests.suites.field.kind import Kind
from tests.suites.field.tiny_models import TINY, VOCABULARY, make_config, make_model
from trainer.policy.forward import forward

TOLERANCE = 1e-4
ORIGINAL = 16
"""Original context of the models, which rows exceed."""
_MAX_CONTEXT = 4 * ORIGINAL
_GIVEN: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 1.0},
}
ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
"""Every one that transformers knows: a new one fails here until it is given settings."""
_OWN_TYPES = {
    "phi3": ("default", "longrope"),
    "phimoe": ("default", "longrope"),
    # An original context of 16 divides by zero in their rotary dimension of 2.
    "gpt_neox": tuple(each for each in ROPE_TYPES if each != "dynamic"),
    "phi": tuple(each for each in ROPE_TYPES if each not in ("dynamic", "longrope")),
}
MODEL_KINDS = tuple(each for each in TINY if each != "gpt2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows that are computed together."""

    model: str
    rope: str
    lengths: tuple[int, ...]
    seed: int = 0

    def ids(self) -> list[list[int]]:
        """Token ids; the first half of the rows share a beginning."""
        rng = np.random.default_rng(self.seed)
        shared = rng.integers(0, VOCABULARY, max(self.lengths)).tolist()
        rows = [rng.integers(0, VOCABULARY, length).tolist() for length in self.lengths]
        for row in rows[: len(rows) // 2 + 1]:
            row[: len(row) // 2] = shared[: len(row) // 2]
        return rows


def rope_config(model: str, rope: str) -> Any:
    """The configuration of a tiny model with a rope type; layer types get one each if they have."""
    given = {"rope_type": rope, "rope_theta": 10000.0, **_GIVEN[rope]}
    config = make_config(model)
    if rope == "longrope":
        pairs = _rotary_pairs(config)
        given["short_factor"] = [1.0 + 0.1 * n for n in range(pairs)]
        given["long_factor"] = [4.0 - 0.5 * n for n in range(pairs)]
        if model == "phimoe":
            given |= {"short_mscale": 1.1, "long_mscale": 1.3}
    parameters: Any = given
    if any(isinstance(value, dict) for value in config.rope_parameters.values()):
        # Windowed layers keep the plain one, as in Gemma 3.
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        parameters = {
            each: plain if "sliding" in each else given for each in config.rope_parameters
        }
    extra = {"max_position_embeddings": ORIGINAL if rope == "dynamic" else _MAX_CONTEXT}
    if model in ("phi3", "phimoe") and rope == "longrope":
        extra["original_max_position_embeddings"] = ORIGINAL
    return make_config(model, rope_parameters=parameters, **extra)


def _rotary_pairs(config: Any) -> int:
    size = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    return int(size * (config.rope_parameters.get("partial_rotary_factor") or 1.0)) // 2


@cache
def _model(model: str, rope: str) -> nn.Module:
    """As transformers makes it; never computed with."""
    return make_model(rope_config(model, rope))


@cache
def _folder(model: str, rope: str) -> Path:
    temporary = tempfile.TemporaryDirectory(prefix="seamflow-rope-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name)
    make_byte_model(folder)
    _model(model, rope).save_pretrained(folder)  # type: ignore[operator]
    return folder


@lru_cache(1000)
@torch.no_grad()
def _alone(model: str, rope: str, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probs [T, V] after each token of a row, by transformers alone."""
    fresh = copy.deepcopy(_model(model, rope))
    logits: torch.Tensor = fresh(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def _compare(given: Rows, row: Sequence[int], found: Any) -> None:
    """Log-probs of a row's tokens from the second on."""
    table = _alone(given.model, given.rope, tuple(row))
    right = [float(table[n - 1, row[n]]) for n in range(1, len(row))]
    difference = np.abs(np.asarray(found) - right).max(initial=0.0)
    if not difference <= TOLERANCE:
        raise AssertionError(f"a row of {len(row)} tokens differs by {difference:.2g}")


@torch.no_grad()
def _check_trainer(given: Rows) -> None:
    """The same model computes twice: what it computed before must not matter either."""
    model = copy.deepcopy(_model(given.model, given.rope))
    packed, rows = can_pack(model), given.ids()
    for order in (rows, rows[::-1]):
        found = forward(model, whole_rows(order), "cpu", packed=packed).logprobs_BT
        for row, found_t in zip(order, found, strict=True):
            _compare(given, row, found_t[: len(row) - 1])


def _check_scorer(given: Rows) -> None:
    folder = _folder(given.model, given.rope)
    scorer = LogProbs(ScoringConfig(run_id="run", column="reference", model=folder))
    rows = [
        Row(
            sample_id=str(number),
            token_ids_T=np.array(ids, np.int32),
            temperatures_T=np.ones(len(ids), np.float32),
            columns={},
        )
        for number, ids in enumerate(given.ids())
    ]
    for row, found in zip(given.ids(), scorer.score(rows), strict=True):
        _compare(given, row, found[1:])


async def _check_engine(given: Rows) -> None:
    """All rows are continued at once; long rows keep the slots when shorter ones have ended."""
    folder = _folder(given.model, given.rope)
    engine = TorchEngine(
        RolloutServerConfig(
            model=folder, max_running=3, max_context=_MAX_CONTEXT, prefill_tokens=24
        )
    )
    await engine.start()
    try:
        await asyncio.gather(*(_continue(engine, given, row) for row in given.ids()))
    finally:
        await engine.close()


async def _continue(engine: TorchEngine, given: Rows, row: list[int]) -> None:
    count = max(2, min(6 + len(row) % 5, _MAX_CONTEXT - len(row)))
    sampling = Sampling(max_new_tokens=count, ignore_eos=True, seed=given.seed)
    request = EngineRequest(request_id="row", token_ids=tuple(row), sampling=sampling)
    ids = list(row)
    logprobs: list[float] = []
    async for chunk in engine.generate(request):
        ids += chunk.token_ids
        logprobs += chunk.logprobs
    for number, logprob in enumerate(logprobs):
        end = len(row) + number
        right = float(_alone(given.model, given.rope, tuple(ids[:end]))[-1, ids[end]])
        if not abs(logprob - right) <= TOLERANCE:
            raise AssertionError(
                f"token {end} of a row that began with {len(row)} has the log-prob {logprob:.4f}, "
                f"alone it has {right:.4f}"
            )


_LENGTHS = st.lists(st.integers(2, 3 * ORIGINAL), min_size=2, max_size=5).map(tuple)
_PAIRS = [(model, rope) for model in MODEL_KINDS for rope in _OWN_TYPES.get(model, ROPE_TYPES)]
_GENERATED = st.builds(
    lambda pair, lengths, seed: Rows(model=pair[0], rope=pair[1], lengths=lengths, seed=seed),
    st.sampled_from(_PAIRS),
    _LENGTHS,
    st.integers(0, 99),
)
_LENGTHS_OF_EXAMPLES = (40, 10, ORIGINAL, ORIGINAL + 1)
_OF_LENGTH = [
    Rows(model=model, rope=rope, lengths=_LENGTHS_OF_EXAMPLES)
    for model, rope in (("phi3", "longrope"), ("gemma3_text", "longrope"), ("llama", "dynamic"))
]
_OF_ALL_TYPES = [
    Rows(model="llama", rope=rope, lengths=_LENGTHS_OF_EXAMPLES) for rope in ROPE_TYPES
]

KINDS = (
    Kind(
        name="rope rows in a micro-batch",
        check=_check_trainer,
        examples=(*_OF_LENGTH, *_OF_ALL_TYPES),
        generated=_GENERATED,
        short=10,
        long=1500,
    ),
    Kind(
        name="rope rows in a scorer",
        check=_check_scorer,
        examples=_OF_LENGTH,
        generated=_GENERATED,
        short=3,
        long=300,
    ),
    Kind(
        name="rope rows in an engine",
        check=_check_engine,
        examples=_OF_LENGTH,
        generated=_GENERATED,
        short=2,
        long=300,
    ),
)
