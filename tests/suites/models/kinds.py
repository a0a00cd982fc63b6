"""Model kinds: what the checks of a run accept is exact beyond every window; the rest is refused.

Each is a tiny model of random weights whose windows are `_WINDOW` tokens. What the trainer computes
(packed and padded), a scorer and the torch engine, for rows of `_WINDOW + 17` tokens, is compared
with what transformers computes for each row alone.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bench.harness.byte_model import make_byte_model
from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import EngineRequest, Sampling
from rollout.server.engines.torch.torch_engine import TorchEngine
from rollout.server.engines.torch.transformers_model import check_rows
from services.lib.transformer.can_pack import can_pack, check_padded
from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row
from services.scoring.scorers.logprobs import LogProbs
from tests.lib.trainer.model.whole_rows import whole_rows
from tests.suites.field.tiny_models import VOCABULARY, make_config, make_model
from trainer.policy.forward import forward

TOLERANCE = 1e-4
_WINDOW = 32
_MOST_PARAMETERS = 5_000_000
_ROWS = (_WINDOW + 17, 9, _WINDOW + 1)
_NAMES = re.compile(r"window|chunk_size|local_attention")
_NO_NAMES = re.compile(r"layer|pattern|mamba|conv|^num|^n_")
_SMALL: Mapping[str, Any] = {"ffn_dim": 48, "n_inner": 48, "d_model": 32, "d_inner": 48}
_DECODER: Mapping[str, Any] = {"is_decoder": True, "is_encoder_decoder": False}
WINDOWED: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": _WINDOW},
    "phi3": {"sliding_window": _WINDOW},
    "starcoder2": {"sliding_window": _WINDOW},
    "mixtral": {"sliding_window": _WINDOW},
    "phimoe": {"sliding_window": _WINDOW},
    "olmoe": {"sliding_window": _WINDOW},
    "qwen2": {"sliding_window": _WINDOW, "use_sliding_window": True, "max_window_layers": 0},
    "qwen3": {"sliding_window": _WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {"sliding_window": _WINDOW, "use_sliding_window": True, "max_window_layers": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
    "bart": {**_DECODER, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    "bert": _DECODER,
    "roformer": _DECODER,
    "rwkv": {"attention_hidden_size": 32},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "opt": {"word_embed_proj_dim": 32},
}
"""Settings of kinds that need some, beside the sizes that all share."""


@dataclass(frozen=True)
class Kind:
    """One architecture with its windows."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def config(self) -> Any:
        """Tiny, with every window of the same size."""
        config = make_config(self.model_type, **self.settings)
        for name, value in list(vars(config).items()):
            is_window = _NAMES.search(name) and not _NO_NAMES.search(name)
            if is_window and type(value) is int and value > _WINDOW:
                setattr(config, name, _WINDOW)
        return config

    @cached_property
    def model(self) -> Any:
        """As transformers makes it; never computed with."""
        return make_model(self.config)

    def save(self, folder: Path) -> Path:
        """Write its folder, with a byte tokenizer."""
        make_byte_model(folder)
        self.model.save_pretrained(folder)
        return folder

    @torch.no_grad()
    def alone(self, row: Sequence[int]) -> torch.Tensor:
        """Log-probs after each token of a row, [T, V], by transformers alone."""
        fresh = copy.deepcopy(self.model)
        logits: torch.Tensor = fresh(torch.tensor([list(row)]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)


@dataclass(slots=True)
class Compared:
    """What became of a kind: the largest difference of each process, or why it is refused."""

    differences: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def silent(self) -> list[str]:
        """Processes that computed something else without a word."""
        return [name for name, each in self.differences.items() if not each <= TOLERANCE]


def kinds() -> Iterator[Kind]:
    """Every causal language model of transformers that a tiny configuration makes."""
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = Kind(model_type, WINDOWED.get(model_type, {}))
        try:
            with torch.device("meta"):
                empty = make_model(kind.config)
            is_small = sum(each.numel() for each in empty.parameters()) < _MOST_PARAMETERS
            if is_small and kind.alone([3, 5, 7]).isfinite().all():
                yield kind
        except Exception:
            continue


def _rows(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    most = min(VOCABULARY, 256)
    prompt, *rest = (rng.integers(3, most, size).tolist() for size in _ROWS)
    return [prompt, rest[0], prompt[:12] + rest[1][12:]]


def compare(kind: Kind, folder: Path, seed: int = 0) -> Compared:
    """Compute the same rows in all processes, unless their checks refuse the model."""
    found, rows = Compared(), _rows(seed)
    kind.save(folder)
    for name, compute in (("trainer", _trainer), ("scorer", _scorer), ("engine", _engine)):
        try:
            check_folder(kind, folder, name)
            found.differences[name] = compute(kind, folder, rows)
        except ValueError as error:
            found.refusals[name] = str(error)
    return found


def check_folder(kind: Kind, folder: Path, process: str) -> None:
    """What the dry run calls for a process (`services.launcher.checks.user_code`)."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if process == "engine":
        check_rows(folder)
    else:
        check_padded(config)


@torch.no_grad()
def _trainer(kind: Kind, _: Path, rows: Sequence[list[int]]) -> float:
    """Padded, and packed if the trainer would."""
    packing = copy.deepcopy(kind.model)
    passes = [(copy.deepcopy(kind.model), False)] + [(packing, True)] * can_pack(packing)
    worst = 0.0
    for model, packed in passes:
        found = forward(model, whole_rows(list(rows)), "cpu", packed=packed).logprobs_BT
        pairs = zip(rows, found, strict=True)
        worst = max([worst, *(_difference(kind, row, got[: len(row) - 1]) for row, got in pairs)])
    return worst


def _scorer(kind: Kind, folder: Path, rows: Sequence[list[int]]) -> float:
    scorer = LogProbs(ScoringConfig(run_id="run", column="reference", model=folder))
    given = [
        Row(
            sample_id=str(number),
            token_ids_T=np.array(ids, np.int32),
            temperatures_T=np.ones(len(ids), np.float32),
            columns={},
        )
        for number, ids in enumerate(rows)
    ]
    pairs = zip(rows, scorer.score(given), strict=True)
    return max(_difference(kind, row, found[1:]) for row, found in pairs)


def _difference(kind: Kind, row: Sequence[int], found: Any) -> float:
    """Of log-probs of a row's tokens from the second on."""
    right = kind.alone(row)[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    return float((torch.as_tensor(np.asarray(found)) - right).abs().max())


def _engine(kind: Kind, folder: Path, rows: Sequence[list[int]]) -> float:
    """Rows of what the engine reads at most, continued side by side to their length here."""
    most = check_rows(folder)
    return asyncio.run(_continued(kind, folder, [row[:most] for row in rows]))


async def _continued(kind: Kind, folder: Path, rows: Sequence[list[int]]) -> float:
    engine = TorchEngine(RolloutServerConfig(model=folder, max_running=3, prefill_tokens=24))
    await engine.start()
    try:
        return max(await asyncio.gather(*(_continue(kind, engine, row) for row in rows)))
    finally:
        await engine.close()


async def _continue(kind: Kind, engine: TorchEngine, row: Sequence[int]) -> float:
    begin = 2 * len(row) // 3
    sampling = Sampling(max_new_tokens=len(row) - begin, ignore_eos=True, seed=1)
    request = EngineRequest(request_id="row", token_ids=tuple(row[:begin]), sampling=sampling)
    ids, logprobs = list(row[:begin]), list[float]()
    async for chunk in engine.generate(request):
        ids += chunk.token_ids
        logprobs += chunk.logprobs
    right = kind.alone(ids)[begin - 1 : -1].gather(1, torch.tensor(ids[begin:])[:, None])[:, 0]
    return float((torch.tensor(logprobs) - right).abs().max())
