"""A small model of random weights of the same architecture, whose windows a few tokens pass.

Whether rows may be packed, padded or cached is a matter of a model's architecture and masks, not of
its sizes. So it is tried on a model that keeps all of the configuration but sizes: few layers of
each kind, two heads, and windows of `WINDOW` tokens, with rows that are longer than those.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from services.chassis.log import get_logger

WINDOW = 16
"""Tokens of every window of the small model."""
TOLERANCE = 1e-4
"""Most nats that a log-prob may differ by from what transformers computes for the row alone."""
_ROW = WINDOW + 17
_WINDOW = re.compile(r"window|chunk|block_size|local|top_?k|span")
_NO_WINDOW = re.compile(r"layer|pattern|^num|^n_|expert|group|moe")
_WIDTH = re.compile(r"intermediate|ffn|n_inner|mlp_dim|feed_forward|d_ff")
_LAYERS, _MOST_LAYERS, _HEADS, _WIDE, _VOCABULARY = 4, 8, 2, 64, 256
_ALIGNED = 16
"""Widths that kernels of experts take."""
_MOST_PARAMETERS = 150_000_000
_LEAST_PARAMETERS = 1_000_000
"""A model of fewer keeps its sizes."""
_KEPT = 32


@dataclass(frozen=True, kw_only=True)
class TrialModel:
    """A small model, and what transformers computes with it for rows alone."""

    model: Any
    """A causal language model on the CPU."""
    rows: Sequence[Sequence[int]]
    """Token ids: longer than any window, with a prefix in common, and shorter."""
    windows: Mapping[str, int]
    """The windows of the real configuration that it shortens, by name."""

    @cached_property
    def alone(self) -> list[torch.Tensor]:
        """Log-probs after each token of each row, [T, V]."""
        return [self._alone(row) for row in self.rows]

    @torch.no_grad()
    def _alone(self, row: Sequence[int]) -> torch.Tensor:
        """By a model that computed nothing yet."""
        fresh = copy.deepcopy(self.model)
        logprobs: torch.Tensor = (
            fresh(torch.tensor([row]), use_cache=False).logits[0].log_softmax(-1)
        )
        return logprobs

    def error(self, found: Sequence[torch.Tensor]) -> float:
        """The most that log-probs differ from those alone; `found` are logits of rows, [T, V]."""
        return max(map(_apart, self.alone, found))

    def error_of_steps(self, found: Sequence[torch.Tensor], most: int) -> float:
        """The same of rows that grow: each token is compared with the row up to it.

        A whole row tells nothing of its beginning where frequencies depend on the length.

        Args:
            found: logits after the last tokens of each row, [tokens, V].
            most: tokens that rows were cut to.
        """
        rows = [row[:most] for row in self.rows]
        ends = [
            range(len(row) - len(got) + 1, len(row) + 1)
            for row, got in zip(rows, found, strict=True)
        ]
        alone = [
            torch.stack([self._alone(row[:end])[-1] for end in each])
            for row, each in zip(rows, ends, strict=True)
        ]
        return max(map(_apart, alone, found))


def _apart(alone: torch.Tensor, found: torch.Tensor) -> float:
    return float((alone - found.log_softmax(-1)).abs().max())


def trial_model(config: Any) -> TrialModel | None:
    """The small model of a configuration; None: transformers cannot make one that computes.

    Args:
        config: of a causal language model; the text part counts, if it also sees or hears.
    """
    text = config.get_text_config(decoder=True)
    config = text if text.model_type != config.model_type else config
    return _trial_model(json.dumps(config.to_dict(), default=str, sort_keys=True), _Config(config))


@dataclass(frozen=True, slots=True)
class _Config:
    """A configuration that counts as equal to all others: its text is the key."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=_KEPT)
def _trial_model(_text: str, config: _Config) -> TrialModel | None:
    for change in (_small, _short):
        changed = copy.deepcopy(config.value)
        changed._attn_implementation = None  # that of the real model may be ours
        try:
            windows = dict(_shorten_windows(changed))
            change(changed)
            if _num_parameters(changed) <= _MOST_PARAMETERS:
                return _computing(changed, windows)
        except Exception as error:  # any of a library that was given odd sizes: try others
            reason = f"{type(error).__name__}: {error}"
            get_logger().info("trial_model_failed", model=config.value.model_type, reason=reason)
    return None


def _computing(config: Any, windows: Mapping[str, int]) -> TrialModel:
    """A model that computes numbers in float64, or else in float32."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = _of(config)
        _spread(model)
    rows = _rows(config.vocab_size)
    for dtype in (torch.float64, torch.float32):
        found = TrialModel(model=model.to(dtype), rows=rows, windows=windows)
        try:
            if all(logprobs.isfinite().all() for logprobs in found.alone):
                return found
        except RuntimeError:  # a kernel without float64
            continue
    raise ValueError("it computes no numbers")


def _of(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """Give matrices values with which every token matters for what comes after it."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)


def _num_parameters(config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _of(config).parameters())


def _rows(vocab_size: int) -> list[list[int]]:
    most = min(vocab_size, _VOCABULARY)
    row = [(5 + 7 * place + place * place) % (most - 3) + 3 for place in range(_ROW)]
    return [row, row[:5], [*row[: WINDOW + 3], *row[:2]], row[1 : WINDOW + 2]]


def _shorten_windows(config: Any) -> Iterator[tuple[str, int]]:
    """Set every setting that may be the size of a window; the real ones by name.

    A window that is as long as any row may be is none.
    """
    longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
    for name, value in list(vars(config).items()):
        if type(value) is not int or not WINDOW < value < longest:
            continue
        if _WINDOW.search(name) and not _NO_WINDOW.search(name):
            setattr(config, name, WINDOW)
            yield name, value


def _small(config: Any) -> None:
    """Keep few layers of each kind, two heads and narrow layers, unless it is small as it is."""
    if _num_parameters(config) <= _LEAST_PARAMETERS:
        return
    _short(config)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads > _HEADS:
        _set_heads(config, heads)
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and value > _WIDE and _WIDTH.search(name):
            setattr(config, name, _WIDE)


def _set_heads(config: Any, heads: int) -> None:
    """Two heads of the size that they have."""
    of_keys = getattr(config, "num_key_value_heads", None)
    width = config.hidden_size // heads * _HEADS
    fits = config.hidden_size % heads == 0 and width % _ALIGNED == 0
    config.hidden_size = width if fits else _HEADS * _WIDE
    for name, value in list(vars(config).items()):
        if name.endswith("attention_heads") and value == heads:
            setattr(config, name, _HEADS)
    config.num_attention_heads = _HEADS
    if isinstance(of_keys, int):
        config.num_key_value_heads = _HEADS if of_keys == heads else 1


def _short(config: Any) -> None:
    """Keep few layers and words."""
    layers = config.num_hidden_layers
    of_layers = [
        value
        for value in vars(config).values()
        if isinstance(value, list | tuple)
        if len(value) == layers
    ]
    kinds = [str(kind) for kind in zip(*of_layers, strict=True)]
    last_new = max((kinds.index(kind) for kind in kinds), default=0)
    kept = min(layers, max(_LAYERS, last_new + 1), _MOST_LAYERS)
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(config, name, value[:kept])
        elif name.endswith("layers") and value == layers:
            setattr(config, name, kept)
        elif isinstance(value, int) and "vocab" in name:
            setattr(config, name, min(value, _VOCABULARY))
        elif isinstance(value, int) and name.endswith("token_id") and value >= _VOCABULARY:
            setattr(config, name, 0)
    config.num_hidden_layers = kept
    config.vocab_size = min(config.vocab_size, _VOCABULARY)
