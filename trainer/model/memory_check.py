"""Refuse models whose state alone is more than this machine holds, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from trainer.config import TrainerConfig

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_MOMENTS = 2
"""Of AdamW, for each parameter."""
_GB = 1e9


def state_bytes(models: Iterable[nn.Module]) -> int:
    """Bytes of weights, gradients and optimizer state, without what a pass computes.

    Args:
        models: whose parameters may be without memory; tied ones count once.
    """
    return sum(
        parameter.nbytes * (2 + _MOMENTS if parameter.requires_grad else 1)
        for model in models
        for parameter in model.parameters()
    )


def check_memory(models: Iterable[nn.Module], config: TrainerConfig, num_parts: int) -> None:
    """Compare the least that a rank needs with what its device, or this machine, has at most.

    Args:
        models: those of the trainer.
        config: of the trainer.
        num_parts: ranks that share the state.

    Raises:
        ValueError: it cannot fit.
    """
    need = state_bytes(models) / num_parts
    if config.device == "cuda" and not config.cpu_offload:
        have, where = float(torch.cuda.mem_get_info()[1]), "its device"
    else:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        have, where = _host_bytes() / ranks, f"this machine, for each of its {ranks} ranks,"
    if need > have:
        offload = "" if config.cpu_offload or config.device == "cpu" else "cpu_offload = true, "
        raise ValueError(
            f"model {config.model}: weights, gradients and optimizer state are "
            f"{need / _GB:.1f} GB on each of {num_parts} ranks, and {where} has "
            f"{have / _GB:.1f} GB: use more ranks, {offload}lora.rank, or a smaller model "
            "(`seamflow plan` says what fits)"
        )


def _host_bytes() -> int:
    """Memory of this machine, or of this process's control group if that is less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP.read_text(encoding="utf-8").strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdecimal() else whole
