"""The loss that TRL's own GRPOTrainer computes, on the tensors that our algorithms get.

Only what the loss needs of a trainer is there: its settings, and log-probs instead of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

from tests.suites.algorithms.formulas import BETA, HIGH, LENGTH, LOW, Rollout

TRL: dict[str, dict[str, Any]] = {
    "cispo": {"loss_type": "cispo", "epsilon_high": 1 + HIGH},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "grpo": {"loss_type": "grpo"},
    "grpo near a reference": {"loss_type": "grpo", "beta": BETA},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
"""Our algorithms in TRL's settings. CISPO's limit is there the ratio itself."""


def trl_loss(
    name: str, rollouts: Sequence[Rollout], advantages: Sequence[float]
) -> tuple[float, list[np.ndarray]]:
    """The loss, and -dL / d log-prob of each token."""
    from trl import GRPOTrainer

    mask = _padded([np.ones_like(r.start) for r in rollouts])
    logprobs = _padded([r.start for r in rollouts]).requires_grad_()
    trainer = _trainer(TRL[name], logprobs)
    inputs = {
        "prompt_ids": torch.zeros(len(rollouts), 1),
        "prompt_mask": torch.ones(len(rollouts), 1),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": torch.tensor(np.array(advantages)),
        "old_per_token_logps": _padded([r.behaviour for r in rollouts]),
        "ref_per_token_logps": _padded([r.reference for r in rollouts]),
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, MagicMock(), inputs)
    loss.backward()
    assert logprobs.grad is not None
    found = [-row[: len(r.start)].numpy() for row, r in zip(logprobs.grad, rollouts, strict=True)]
    return loss.item(), found


def _trainer(settings: dict[str, Any], logprobs: torch.Tensor) -> Any:
    # What it logs goes nowhere.
    trainer = MagicMock()
    trainer.configure_mock(
        **{
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "beta": 0.0,
            "epsilon_low": LOW,
            "epsilon_high": HIGH,
            "max_completion_length": LENGTH,
            "use_vllm": False,
            "current_gradient_accumulation_steps": 1,
            "accelerator.num_processes": 1,
            "_entropy_bonus_enabled": False,
            "model.training": True,
            **settings,
        }
    )
    trainer.accelerator.gather.side_effect = lambda tensor: tensor
    trainer.args = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    answer = (logprobs, torch.zeros_like(logprobs), None)
    trainer._get_per_token_logps_and_entropies.return_value = answer
    return trainer


def _padded(rows: Sequence[np.ndarray]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor(np.stack([np.pad(row, (0, width - len(row))) for row in rows]))
