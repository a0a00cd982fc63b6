"""Hidden states of prompts in a small language model, cut into a frozen and a trained part."""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from services.ranker.regression import Prompt

if TYPE_CHECKING:
    import torch

_BATCH_TOKENS = 2048
_CURE = (
    "trained_layers = 0 trains the head alone; else take a model with the parts of a Llama or Qwen3"
)


class PromptEncoder:
    """Computes a prompt's hidden states once, and keeps those of the newest prompts."""

    def __init__(self, folder: Path, trained_layers: int, *, device: str, max_kept: int) -> None:
        """Load the model of a Hugging Face folder.

        Args:
            folder: the model.
            trained_layers: last layers that `upper` computes; 0: none.
            device: cpu, cuda or cuda:N.
            max_kept: bytes of hidden states that are kept, of the prompts used last.

        Raises:
            ValueError: it cannot be loaded, or cannot be cut there.
        """
        import torch

        from services.lib.transformer.load_causal import load_causal

        base = load_causal(folder, torch.float32).base_model.to(device).eval()
        self._device = device
        self.vocab_size: int = base.config.vocab_size
        """Ids that it embeds."""
        self._max_kept, self._num_kept = max_kept, 0
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self.lower: Any = base.requires_grad_(requires_grad=False)
        """Frozen layers."""
        self.upper: Any = _cut(base, trained_layers, folder) if trained_layers else None
        """Last layers with the pretrained weights, which a fit copies; None: none is trained."""

    def states(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        """Of each prompt what the trained part reads: [T, H], or its features [2H] without one."""
        found = [self._known(prompt.tobytes()) for prompt in prompts]
        missing = [i for i, states in enumerate(found) if states is None]
        for batch in batches([len(prompts[i]) for i in missing]):
            numbers = [missing[at] for at in batch]
            computed = self._computed([prompts[i] for i in numbers])
            for i, states in zip(numbers, computed, strict=True):
                found[i] = states
                self._keep(prompts[i].tobytes(), states)
        return [states for states in found if states is not None]

    def _computed(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        ids = [torch.from_numpy(prompt.astype(np.int64)) for prompt in prompts]
        mask_BT = pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
        ids_BT = pad_sequence(ids, batch_first=True)
        with torch.no_grad():
            states_BTH = self.lower(
                input_ids=ids_BT.to(self._device),
                attention_mask=mask_BT.to(self._device),
                use_cache=False,
            ).last_hidden_state.cpu()
        if self.upper is None:
            return list(pooled(states_BTH, mask_BT).clone())
        return [
            row_TH[: len(prompt)].half() for row_TH, prompt in zip(states_BTH, prompts, strict=True)
        ]

    def _known(self, key: bytes) -> torch.Tensor | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: bytes, states: torch.Tensor) -> None:
        with self._lock:
            if key not in self._kept:
                self._num_kept += states.nbytes
            self._kept[key] = states
            self._kept.move_to_end(key)
            while self._num_kept > self._max_kept and len(self._kept) > 1:
                self._num_kept -= self._kept.popitem(last=False)[1].nbytes


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of similar lengths, at most 2,048 tokens with padding in a batch."""
    batch: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[at] * (len(batch) + 1) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch


def pooled(states_BTH: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Features of each row, shape [B, 2H]: the mean over its tokens, and its last token."""
    import torch

    counts_B1 = mask_BT.sum(1, keepdim=True)
    mean_BH = (states_BTH * mask_BT.unsqueeze(2)).sum(1) / counts_B1
    last_BH = states_BTH[torch.arange(len(mask_BT), device=mask_BT.device), counts_B1[:, 0] - 1]
    return torch.cat([mean_BH, last_BH], 1)


def _cut(base: Any, trained_layers: int, folder: Path) -> Any:
    """Leave the lower layers in `base`; return a model of the upper ones that reads hidden states.

    Their composition is compared with the whole model on a few tokens: a model whose forward does
    more than embed, compute layers and normalize is refused.
    """
    import torch

    layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
    if layers is None or norm is None or not 0 < trained_layers < len(layers):
        number = "no list of layers with a norm" if layers is None else f"{len(layers)} layers"
        raise ValueError(
            f"trained_layers is {trained_layers}, and model {folder} has {number}: {_CURE}"
        )
    ids_BT = torch.arange(1, 9, device=base.device)[None] % base.config.vocab_size
    with torch.no_grad():
        whole = base(input_ids=ids_BT, use_cache=False).last_hidden_state
    upper = _with_layers(copy.copy(base), layers[-trained_layers:], -trained_layers)
    upper.embed_tokens = None
    _with_layers(base, layers[:-trained_layers], 0)
    base.norm = torch.nn.Identity()
    with torch.no_grad():
        lower = base(input_ids=ids_BT, use_cache=False).last_hidden_state
        composed = upper(inputs_embeds=lower, use_cache=False).last_hidden_state
    if not torch.allclose(composed, whole, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"trained_layers is {trained_layers}, and model {folder} computes: {_CURE}"
        )
    return upper


def _with_layers(base: Any, layers: Any, first: int) -> Any:
    """Give a model these layers, from index `first` of its own on, and a configuration that says
    so."""
    base._modules = dict(base._modules)
    base.config = copy.deepcopy(base.config)
    base.config.num_hidden_layers = len(layers)
    if (types := getattr(base.config, "layer_types", None)) is not None:
        base.config.layer_types = types[first:] if first else types[: len(layers)]
    base.layers = layers
    return base
