"""Whether a model computes rows beside others as it does alone, packed or padded, by trying."""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from services.chassis.log import get_logger
from services.lib.transformer.packing import Packing
from services.lib.transformer.row_attention.packed_attention import Attention, kernels_for, use_rows
from services.lib.transformer.row_rope import row_positions, row_rope
from services.lib.transformer.trial_model import TOLERANCE, TrialModel, trial_model

Outputs = Callable[..., torch.Tensor]

_LAYERS = {"full_attention", "sliding_attention"}
_TOLERANCE = 1e-3
"""Of log-probs, in float32."""
_ROUNDINGS = 16
"""Of log-probs in a coarser type, in units of its precision."""


def can_pack(
    model: nn.Module,
    outputs: Outputs | None = None,
    *,
    device: str | None = None,
    precision: torch.dtype | None = None,
    attention: Attention = "auto",
) -> bool:
    """Whether the model gives the same results packed as padded; if so, it accepts `rows`.

    Models with recurrent layers or custom attention do not, nor those whose rotary frequencies
    depend on the length of a row. What a model declares is verified: on rows longer than its
    windows, by a small model of its architecture, and on two short rows, with one kernel after the
    other.

    Args:
        model: of any head, if `outputs` is given, else a causal language model.
        outputs: from the arguments of a pass, with `logits_to_keep` if it is packed, to what the
            model says of its tokens; default: the log-probs of a language model.
        device: of its inputs; None: of its parameters.
        precision: type that it computes in; None: that of its parameters.
        attention: kernel within rows; "auto": the first that gives the same results.

    Raises:
        ValueError: the kernel that is asked for is not there, or does not give the same results.
    """
    device = device or str(next(model.parameters()).device)
    precision = precision or next(model.parameters()).dtype
    kernels = kernels_for(attention, device, precision)
    takes_places = outputs is not None or "logits_to_keep" in signature(model.forward).parameters
    may = takes_places and claims_to_pack(model) and _packs_long_rows(model.config)
    tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(precision).eps)
    if may and _one_packs(model, kernels, outputs or partial(_logprobs, model), device, tolerance):
        return True
    if attention != "auto":
        raise ValueError(
            f"attention is {attention!r}, with which {type(model).__name__} does not compute "
            "packed rows as padded ones: set it to 'auto'"
        )
    return False


def _one_packs(
    model: nn.Module, kernels: Sequence[str], outputs: Outputs, device: str, tolerance: float
) -> bool:
    """Whether the model has got a kernel that gives the results of padded rows."""
    expected, before = _try_padded(outputs, device), model.config._attn_implementation  # type: ignore[union-attr]
    for kernel in kernels:
        if _error(model, kernel, outputs, expected, device) <= tolerance:
            return True
    get_logger().warning("packing_disabled", model=type(model).__name__)
    model.set_attn_implementation(before)  # type: ignore[operator]
    return False


def _error(
    model: nn.Module, kernel: str, outputs: Outputs, expected: torch.Tensor, device: str
) -> float:
    """Of a kernel's results; no number if it fails. The model has it then."""
    try:
        use_rows(model, kernel)
        error: float = (_try_packed(outputs, device) - expected).abs().max().item()
    except Exception as problem:  # any error: fall back to another kernel, or to padded rows
        reason = f"{type(problem).__name__}: {problem}"
        get_logger().warning("packing_failed", attention=kernel, reason=reason)
        return float("nan")
    get_logger().info("packing_tried", attention=kernel, difference=error)
    return error


def claims_to_pack(model: nn.Module) -> bool:
    """Whether a model declares what packed rows need; `can_pack` verifies it."""
    # A model with sinks declares no SDPA, which has none of its own.
    kernels = ("_supports_sdpa", "_supports_flash_attn")
    layers = getattr(model.config, "layer_types", None) or ()
    return (
        getattr(model, "_supports_attention_backend", False)
        and any(getattr(model, flag, False) for flag in kernels)
        and not getattr(model, "_is_stateful", False)
        and set(layers) <= _LAYERS
        and row_rope(model) is None
    )


def _packs_long_rows(config: Any) -> bool:
    """Whether rows longer than any window are the same packed; no, if that cannot be tried."""
    trial = trial_model(config)
    try:
        return trial is not None and trial.error(_packed_rows(trial)) <= TOLERANCE
    except Exception as problem:  # any error: compute padded rows
        reason = f"{type(problem).__name__}: {problem}"
        get_logger().warning("packing_failed", attention="long rows", reason=reason)
        return False


@torch.no_grad()
def _packed_rows(trial: TrialModel) -> list[torch.Tensor]:
    ids_BT, lengths_B = _joined(trial)
    model = copy.deepcopy(trial.model)
    use_rows(model)
    packing = Packing.of(ids_BT, lengths_B, "cpu")
    logits_UV = model(**packing.arguments).logits[0]
    rows = zip(packing.places_BT, lengths_B, strict=True)
    return [logits_UV[places_T[:length]] for places_T, length in rows]


def check_padded(config: Any) -> None:
    """Check that a row is the same with others in one pass, padded on the right.

    Raises:
        ValueError: it is not: neither log-probs nor gradients would be those of the model.
    """
    trial = trial_model(config)
    if trial is not None and not (error := trial.error(_padded_rows(trial))) <= TOLERANCE:
        raise ValueError(
            f"model_type {config.model_type} computes a row otherwise when others are computed "
            f"beside it (log-probs differ by {error:.2g}): use another model"
        )


@torch.no_grad()
def _padded_rows(trial: TrialModel) -> list[torch.Tensor]:
    ids_BT, lengths_B = _joined(trial)
    model, lengths = copy.deepcopy(trial.model), torch.from_numpy(lengths_B)
    arguments = {"input_ids": torch.from_numpy(ids_BT).long()}
    if row_rope(model) is not None:
        arguments["position_ids"] = row_positions(lengths, ids_BT.shape[1])
    logits_BTV = model(**arguments, use_cache=False).logits
    return [logits_TV[:length] for logits_TV, length in zip(logits_BTV, lengths_B, strict=True)]


def _joined(trial: TrialModel) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    lengths_B = np.array([len(row) for row in trial.rows])
    ids_BT = np.zeros((len(lengths_B), lengths_B.max()), np.int32)
    for number, row in enumerate(trial.rows):
        ids_BT[number, : len(row)] = row
    return ids_BT, lengths_B


_TRIED = np.array([[1, 2, 3, 4], [1, 2, 5, 0]], np.int32)
_TRIED_LENGTHS = np.array([4, 3])


def _logprobs(model: nn.Module, **arguments: Any) -> torch.Tensor:
    logits: torch.Tensor = model(**arguments).logits
    return logits.float().log_softmax(-1)


@torch.no_grad()
def _try_padded(outputs: Outputs, device: str) -> torch.Tensor:
    found = outputs(input_ids=torch.from_numpy(_TRIED).long().to(device), use_cache=False)
    return torch.cat([found[0], found[1, :3]]).float()


@torch.no_grad()
def _try_packed(outputs: Outputs, device: str) -> torch.Tensor:
    packing = Packing.of(_TRIED, _TRIED_LENGTHS, device)
    places = torch.cat([packing.places_BT[0], packing.places_BT[1, :3]])
    return outputs(**packing.arguments, logits_to_keep=places)[0].float()
