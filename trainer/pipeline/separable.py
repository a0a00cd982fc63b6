"""Whether a critic can be trained beside the policy, each with its part of the loss.

In a pipeline the last stages of both lie on different ranks. The policy's needs the critic's values
without their gradient; the critic's gets the gradient of its values from the same loss, with the
recorded log-probs for the policy's. That is right if the gradient of the values does not depend on
log-probs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from trainer.algorithms.base import Algorithm, PolicyTokens

_ROWS, _TOKENS = 2, 5


def check_separable(algorithm: Algorithm, name: str) -> None:
    """Compare the gradient of values with different log-probs.

    Raises:
        ValueError: they differ.
    """
    tokens = _tokens()
    grads = [
        _gradient(algorithm, replace(tokens, logprobs_BT=scale * tokens.behaviour_logprobs_BT))
        for scale in (1.0, 1.5)
    ]
    if not torch.equal(*grads):
        raise ValueError(
            f"algorithm.name is {name!r}: the gradient of its values depends on log-probs, so the "
            "critic cannot be trained beside the policy; set critic to 'layer' or backend to 'fsdp'"
        )


def _gradient(algorithm: Algorithm, tokens: PolicyTokens) -> torch.Tensor:
    values = tokens.values_BT
    assert values is not None
    logprobs = tokens.logprobs_BT.clone().requires_grad_()
    loss = algorithm.loss(replace(tokens, logprobs_BT=logprobs)).loss
    (gradient,) = torch.autograd.grad(loss, values)
    return gradient


def _tokens() -> PolicyTokens:
    rng = torch.Generator().manual_seed(0)
    shape = _ROWS, _TOKENS
    drawn = [torch.rand(shape, generator=rng, dtype=torch.float64) for _ in range(4)]
    ones, zeros = torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    return PolicyTokens(
        logprobs_BT=-drawn[0],
        values_BT=drawn[1].requires_grad_(),
        behaviour_logprobs_BT=-drawn[0],
        advantages_BT=drawn[2][:, :1].expand(shape),
        weights_BT=ones,
        turn_rewards_BT=zeros,
        reference_logprobs_BT=-drawn[3],
        staleness_BT=torch.zeros(shape, dtype=torch.int64),
        loss_mask_BT=torch.ones(shape, dtype=torch.bool),
        rollouts_B=torch.arange(_ROWS),
        groups_B=torch.zeros(_ROWS, dtype=torch.int64),
    )
