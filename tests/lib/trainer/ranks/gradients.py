"""The gradient of an algorithm as the trainer computes it, and what a formula sees of a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from seamflow.trajectory.v1 import trajectory_pb2

from tests.lib.trainer.support import VOCABULARY, make_samples, temperatures_of, trainer_config
from tests.suites.algorithms.formulas import (
    BETA,
    EPSILON,
    GAMMA,
    HIGH,
    LAMBDA,
    LENGTH,
    LOW,
    MACRO,
    VALUE_WEIGHT,
    Rollout,
)
from trainer.algorithms.base import PolicyTokens, make_algorithm
from trainer.config import TrainerConfig
from trainer.data.advantages import compute_advantages
from trainer.data.micro_batch import MicroBatch, plan_micro_batches
from trainer.data.token_sequence import sequence
from trainer.model.token_predictions import token_logprobs

UNBOUNDED = 1e9


def config(algorithm: str, **settings: object) -> TrainerConfig:
    """An algorithm as its paper has it: no bound on the importance of a token."""
    values = {
        "algorithm__clip_low": LOW,
        "algorithm__clip_high": HIGH,
        "algorithm__importance_cap": UNBOUNDED,
        "algorithm__advantage_epsilon": EPSILON,
        "algorithm__loss_length": LENGTH,
        "algorithm__reference_column": "ref_logprobs",
        "algorithm__beta": BETA,
        "algorithm__discount": GAMMA,
        "algorithm__gae_lambda": LAMBDA,
        "algorithm__value_weight": VALUE_WEIGHT,
        "algorithm__macro_action_tokens": MACRO,
    }
    return trainer_config(
        run_id="r",
        model=Path("m"),
        checkpoint__folder=Path("c"),
        algorithm__name=algorithm,
        **(values | settings),
    )


def make_case(seed: int) -> tuple[list[trajectory_pb2.Sample], list[np.ndarray]]:
    """Ragged samples with mixed versions and temperatures, and float64 logits for each."""
    samples = make_samples(seed, groups=4)
    rng = np.random.default_rng(seed)
    return samples, [rng.normal(size=(len(s.loss_mask), VOCABULARY)) for s in samples]


def rollouts_of(samples: list[trajectory_pb2.Sample], logits: list[np.ndarray]) -> list[Rollout]:
    """What the formulas see: trainable tokens only."""
    found = []
    for sample, logit in zip(samples, logits, strict=True):
        # Each row predicts the next token, at the temperature of that token's turn.
        divisors = np.append(temperatures_of(sample)[1:], np.float32(1)).astype(np.float64)
        scaled = logit / divisors[:, None]
        logprobs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        recorded = np.frombuffer(sample.tokens.logprobs, "<f4")
        ids = np.frombuffer(sample.tokens.token_ids, "<i4")
        reference = np.frombuffer(sample.columns[0].values, "<f4").astype(np.float64)
        places = [t for t in range(1, len(sample.loss_mask)) if sample.loss_mask[t]]
        found.append(
            Rollout(
                reward=sample.rewards[0].value,
                group=sample.group_id,
                behaviour=recorded[places].astype(np.float64),
                start=np.array([logprobs[t - 1, ids[t]] for t in places]),
                reference=reference[places],
                values=values_of(logit)[np.array(places) - 1],
                turns=np.cumsum(np.diff(places, prepend=places[0]) > 1),
            )
        )
    return found


def values_of(logit: np.ndarray) -> np.ndarray:
    """What a critic expects at each place: it is as random as the logits."""
    return logit[:, 0]


def ours(
    samples: list[trajectory_pb2.Sample],
    logits: list[np.ndarray],
    settings: TrainerConfig,
    budget: int = 50,
    sums: dict[str, float] | None = None,
    *,
    of_values: bool = False,
) -> list[np.ndarray]:
    """-dL / d log-prob of each trainable token: sequences, micro-batches, autograd.

    Statistics and the loss are added to `sums`. `of_values`: by what the critic expects instead.
    """
    algorithm = make_algorithm(settings)
    sequences = [sequence(sample, settings.algorithm.reference_column) for sample in samples]
    given = compute_advantages(sequences, algorithm, settings)
    (batches,) = plan_micro_batches(
        sequences,
        given,
        num_ranks=1,
        micro_batch_tokens=budget,
        whole_groups=algorithm.whole_groups,
    )
    by_tokens = {bytes(item.token_ids_T): n for n, item in enumerate(sequences)}
    found: list[np.ndarray] = [np.zeros(0)] * len(samples)
    for batch in batches:
        rows = [
            by_tokens[bytes(row[:length])]
            for row, length in zip(batch.token_ids_BT, batch.lengths_B, strict=True)
        ]
        tokens = policy_tokens(batch, [logits[n] for n in rows], critic=algorithm.critic)
        terms = algorithm.loss(tokens)
        (terms.loss / given.denominator).backward()  # type: ignore[no-untyped-call]
        found_sums = {**terms.sums, "loss": terms.loss.detach() / given.denominator}
        for name in sums or ():
            sums[name] += found_sums[name].item()  # type: ignore[index]
        leaf = tokens.values_BT if of_values else tokens.logprobs_BT
        for place, n in enumerate(rows):
            found[n] = -leaf.grad[place][tokens.loss_mask_BT[place]].numpy()  # type: ignore[union-attr, index]
    return found


def policy_tokens(batch: MicroBatch, logits: list[np.ndarray], *, critic: bool) -> PolicyTokens:
    """What the loss is given for a micro-batch whose rows have these logits."""
    logprobs, values = predicted(batch, logits)
    return PolicyTokens(
        logprobs_BT=logprobs,
        values_BT=values if critic else None,
        behaviour_logprobs_BT=torch.from_numpy(batch.behaviour_logprobs_BT[:, 1:]).double(),
        reference_logprobs_BT=torch.from_numpy(batch.reference_logprobs_BT[:, 1:]).double(),
        advantages_BT=torch.from_numpy(batch.advantages_B)[:, None].expand_as(logprobs),
        turn_rewards_BT=torch.from_numpy(batch.turn_rewards_BT[:, 1:]).double(),
        weights_BT=torch.from_numpy(batch.weights_B)[:, None].expand_as(logprobs),
        staleness_BT=2 - torch.from_numpy(batch.weight_versions_BT[:, 1:]),
        loss_mask_BT=torch.from_numpy(batch.loss_mask_BT[:, 1:]),
        rollouts_B=torch.from_numpy(batch.rollouts_B),
        groups_B=torch.from_numpy(batch.groups_B),
    )


def predicted(batch: MicroBatch, logits: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and values of the tokens 1..T-1 of each row, to be differentiated by."""
    width = batch.token_ids_BT.shape[1]
    padded = np.zeros((len(logits), width, VOCABULARY))
    for row, logit in zip(padded, logits, strict=True):
        kept = min(width, len(logit))
        row[:kept] = logit[:kept]
    logprobs = token_logprobs(
        torch.from_numpy(padded)[:, :-1],
        torch.from_numpy(batch.token_ids_BT).long()[:, 1:],
        torch.from_numpy(batch.temperatures_BT[:, 1:]),
    )
    values = torch.from_numpy(padded[:, :-1, 0].copy())
    return logprobs.requires_grad_(), values.requires_grad_()


def greatest_error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Relative to the greatest derivative."""
    scale = max(np.abs(each).max() for each in expected)
    worst = max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))
    return float(worst / scale)
