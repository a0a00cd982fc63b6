"""A Hugging Face causal language model with a slotted cache: prefill rows, decode all rows.

Shapes: R rows, P padded prompt length, T positions, V vocabulary.
"""

# ruff: noqa: N803, N806 -- tensors carry their shapes in their names

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from rollout.server.engine import WeightsError
from rollout.server.engines.cache import SlotCache
from rollout.server.engines.checkpoint import load_checked, weight_files

__all__ = ["SlotModel", "check_model_folder"]

_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_model_folder(folder: Path) -> None:
    """Raise `ValueError` naming the first thing a model folder lacks."""
    if not folder.is_dir():
        raise ValueError(f"model is {folder}: no such folder")
    if not (folder / "config.json").is_file():
        raise ValueError(f"model is {folder}: it has no config.json")
    tokenizer_files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in tokenizer_files):
        raise ValueError(
            f"model is {folder}: it has no tokenizer ({', '.join(tokenizer_files)});"
            " save it there with tokenizer.save_pretrained()"
        )
    try:
        weight_files(folder)
    except WeightsError as error:
        raise ValueError(f"model is {error}; save it with model.save_pretrained()") from error


class SlotModel:
    """The forward passes of one model over `slots` rows, in float32 on the CPU."""

    def __init__(self, folder: Path, slots: int, max_context: int | None) -> None:
        """Load `folder`. Raises `ValueError` if it is unusable or has less than `max_context`."""
        check_model_folder(folder)
        _no_progress_bars()
        self._folder = folder
        self._slots = slots
        self._config = _read_config(folder)
        self.max_context = _context(self._config, max_context)
        self.vocab_size = int(self._config.vocab_size)
        self.eos_token_ids = _eos_token_ids(folder, self._config)
        self._model = _load_model(folder)
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}
        self._cache = self._new_cache()

    def _new_cache(self) -> SlotCache:
        return SlotCache(self._config.num_hidden_layers, self._slots, self.max_context)

    def prefill(self, tokens_RP: Tensor, first: int) -> None:
        """Fill rows first .. first+R-1 with the keys and values of right-padded prompts.

        Padding writes positions no mask lets anyone read before decoding overwrites them.
        """
        window = self._cache.window
        window.first, window.rows, window.positions_R = first, tokens_RP.shape[0], None
        # Padding may reach past the positions a model has learned.
        positions_P = torch.arange(tokens_RP.shape[1]).clamp_(max=self.max_context - 1)
        # The base model has no head: logits come from the decode step that feeds the last token.
        self._model.base_model(
            input_ids=tokens_RP,
            position_ids=positions_P[None].expand_as(tokens_RP),
            past_key_values=self._cache,
            use_cache=True,
        )

    def decode(self, tokens_R: Tensor, positions_R: Tensor, mask_R11T: Tensor) -> Tensor:
        """Feed one token per row at its position; return the logits [R, V] of what follows.

        `mask_R11T` is additive; its width is how far attention reads.
        """
        window = self._cache.window
        window.rows, window.positions_R, window.width = (
            tokens_R.shape[0],
            positions_R,
            mask_R11T.shape[3],
        )
        output = self._model(
            input_ids=tokens_R[:, None],
            position_ids=positions_R[:, None],
            attention_mask=mask_R11T,
            past_key_values=self._cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def move(self, source_M: Tensor, target_M: Tensor, positions: int) -> None:
        """Copy cached rows: target_M[i] becomes source_M[i]."""
        self._cache.move(source_M, target_M, positions)

    def load_weights(self, folder: Path) -> None:
        """Copy `folder`'s weights into the parameters. Raises `WeightsError`, changing nothing."""
        state = self._model.state_dict()
        for name, tensor in load_checked(folder, state).items():
            state[name].copy_(tensor)
        self._folder = folder

    def release(self) -> int:
        """Drop cache and weights; return the bytes given back."""
        freed = self._cache.nbytes
        self._cache = self._new_cache()
        for parameter in self._model.parameters():
            freed += parameter.nbytes
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        return freed

    def restore(self) -> None:
        """Allocate the weights again and load the folder they last came from."""
        for name, parameter in self._model.named_parameters():
            parameter.data = torch.zeros(self._shapes[name], dtype=parameter.dtype)
        self.load_weights(self._folder)


def _read_config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"model is {folder}: config.json cannot be used: {error}") from error
    text = config.get_text_config(decoder=True)
    unsupported = set(getattr(text, "layer_types", None) or ()) - _ATTENTION_TYPES
    if unsupported:
        raise ValueError(
            f"model is {folder}: the torch engine cannot slot the state of its layers of type"
            f" {', '.join(sorted(unsupported))}; use another engine"
        )
    return text


def _context(config: Any, max_context: int | None) -> int:
    """Return the context to serve, checked against the model."""
    limit = int(getattr(config, "max_position_embeddings", None) or 4096)
    # Under the window, sliding attention equals full attention; beyond it the slots would be wrong.
    window = getattr(config, "sliding_window", None)
    uses_window = "sliding_attention" in (
        getattr(config, "layer_types", None) or ("sliding_attention",)
    )
    if window and uses_window and getattr(config, "use_sliding_window", True):
        limit = min(limit, int(window))
    if max_context is not None and max_context > limit:
        raise ValueError(f"max_context is {max_context}: this model reads at most {limit} tokens")
    return max_context or limit


def _load_model(folder: Path) -> Any:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise ValueError(f"model is {folder}: it cannot be loaded: {error}") from error
    assert isinstance(model, nn.Module)
    return model.eval().requires_grad_(False)  # type: ignore[no-untyped-call]


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the generation config, the model or the tokenizer."""
    found = None
    if (folder / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if found is None:
        found = config.eos_token_id
    if found is None:
        found = _tokenizer_eos(folder)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _tokenizer_eos(folder: Path) -> int | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError) as error:
        raise ValueError(f"model is {folder}: its tokenizer cannot be used: {error}") from error
    found: int | None = tokenizer.eos_token_id
    return found


def _no_progress_bars() -> None:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
