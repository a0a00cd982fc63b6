"""Load a frozen Hugging Face model onto the device, or offloaded to the host's memory.

Offloaded, while one block computes, the next is copied to the device, as in RLHFuse (arXiv
2409.13221, inter-stage fusion) for reward and reference models. The device holds two blocks at a
time, and the weights outside of blocks. On a GPU, copies run from pinned memory on a separate
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from services.lib.transformer.load_causal import transformer_blocks
from services.scoring.config import ScoringConfig

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def load_frozen(config: ScoringConfig, auto_class: Any, **settings: Any) -> nn.Module:
    """Load `config.model` with one of transformers' auto classes, for inference.

    Raises:
        ValueError: the folder does not exist, or holds another kind of model.
    """
    from transformers.utils import logging

    if not config.model.is_dir():
        raise ValueError(f"model {config.model}: no such folder; give a Hugging Face model folder")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(config.threads)
    try:
        model: nn.Module = auto_class.from_pretrained(
            config.model,
            dtype=_DTYPES[config.dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **settings,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ValueError(f"model {config.model}: {error}") from error
    model.eval().requires_grad_(False)
    return _offload(model, config.device) if config.cpu_offload else model.to(config.device)


def _offload(model: nn.Module, device: str) -> nn.Module:
    """Keep the weights of the model's blocks on the host, except while they compute."""
    if not (blocks := transformer_blocks(model)):
        raise ValueError(
            f"{type(model).__name__} declares no blocks to swap in one by one: set cpu_offload to "
            "false"
        )
    BlockSwapper(blocks, device)  # referenced by the hooks of the blocks
    return model.to(device)


class BlockSwapper:
    """Swaps the blocks of a model in and out, called in order, one forward pass at a time."""

    def __init__(self, blocks: Sequence[nn.Module], device: str) -> None:
        """Move the weights of `blocks` to the host; the rest of the model may go to the device."""
        self._device = torch.device(device)
        self._blocks = [list(block.parameters()) for block in blocks]
        self._host = [[self._kept(weight) for weight in block] for block in self._blocks]
        self._copying = (
            torch.cuda.Stream(self._device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        )
        for number, block in enumerate(blocks):
            self._take_out(number)
            block.register_forward_pre_hook(lambda *_, number=number: self._enter(number))
            block.register_forward_hook(
                lambda *_, number=number: self._take_out(number), always_call=True
            )

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _kept(self, weight: nn.Parameter) -> Tensor:
        # Only copies from pinned memory overlap with computation.
        return weight.data.cpu().pin_memory() if self._on_gpu else weight.data.cpu()

    def _enter(self, number: int) -> None:
        """Wait for the weights of a block, and start copying those of the next."""
        self._bring_in(number)
        if self._copying is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_stream(self._copying)
            for weight in self._blocks[number]:
                # Its memory is not reused until this block has computed.
                weight.data.record_stream(computing)
        if number + 1 < len(self._blocks):
            self._bring_in(number + 1)

    def _bring_in(self, number: int) -> None:
        if any(weight.numel() for weight in self._blocks[number]):
            return  # copied when the block before it was entered
        with self._copy_stream():
            for weight, kept in zip(self._blocks[number], self._host[number], strict=True):
                weight.data = kept.to(self._device, non_blocking=True, copy=True)

    def _copy_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._copying is None else torch.cuda.stream(self._copying)

    def _take_out(self, number: int) -> None:
        for weight in self._blocks[number]:
            weight.data = weight.data.new_empty(0, device=self._device)
