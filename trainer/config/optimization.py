"""Settings of what is optimized, and how: algorithm, KL terms, optimizer, LoRA."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.chassis.config.settings import Settings

_HERE = "trainer.algorithms"
ALGORITHMS = {
    "cispo": f"{_HERE}.critic_free:cispo",
    "dapo": f"{_HERE}.critic_free:dapo",
    "decoupled_ppo": f"{_HERE}.critic_free:decoupled_ppo",
    "distillation": f"{_HERE}.critic_free:Distillation",
    "dpo": f"{_HERE}.groupwise:dpo",
    "dr_grpo": f"{_HERE}.critic_free:dr_grpo",
    "grpo": f"{_HERE}.critic_free:grpo",
    "gspo": f"{_HERE}.critic_free:gspo",
    "ma_ppo": f"{_HERE}.actor_critic:ma_ppo",
    "ppo": f"{_HERE}.actor_critic:ppo",
    "reinforce_pp": f"{_HERE}.critic_free:reinforce_pp",
    "reinforce_pp_baseline": f"{_HERE}.critic_free:reinforce_pp_baseline",
    "rloo": f"{_HERE}.critic_free:rloo",
    "tba": f"{_HERE}.groupwise:tba",
    "turn_ppo": f"{_HERE}.actor_critic:turn_ppo",
}


def check_algorithm_name(name: str) -> str:
    """The name, if it is a built-in or has the form of a plug-in.

    Raises:
        ValueError: it is neither; says what there is.
    """
    if ":" in name or name in ALGORITHMS:
        return name
    near = difflib.get_close_matches(name, ALGORITHMS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = ", ".join(ALGORITHMS)
    raise ValueError(f'give one of {known}, or a plug-in "package.module:Name"{hint}')


ImportanceMode = Literal["truncate", "mask", "icepop", "none"]
"""Treatment of the importance ratio of a token that older weights sampled."""
LossAggregation = Literal["algorithm", "token_mean", "sequence_mean", "sequence_sum", "constant"]
"""How token losses are averaged."""
KLEstimator = Literal["k1", "k2", "k3"]
"""Estimator of the distance from a reference, from sampled tokens."""

Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
ClipRange = Annotated[float, Field(ge=0)]


class AlgorithmConfig(Settings):
    """The reinforcement-learning algorithm: advantages, importance ratios, loss."""

    name: str = "dapo"
    """Built-in algorithm (docs/algorithms.md), or "package.module:Name"."""
    _known = field_validator("name")(check_algorithm_name)
    reward: str = ""
    """Name of the reward to train on; unset: "reward", or the only one that a rollout has."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of several named rewards, such as {correct = 1.0, format = 0.2}: their sum is trained
    on and recorded as `reward`. One that a rollout lacks counts 0."""
    reference_column: str = ""
    """Column with log-probs under a frozen model: the reference of the KL terms, tba and dpo, or
    the teacher of distillation. A scoring service writes it."""
    shuffle_rewards: bool = False
    """Permute the rewards over a step's rollouts: a control experiment that must not learn."""
    clip_low: ClipRange | None = None
    """Trust region: no gradient below ratio 1 - clip_low. inf: none; unset: the algorithm's."""
    clip_high: ClipRange | None = None
    """Trust region: no gradient above ratio 1 + clip_high. inf: none; unset: the algorithm's."""
    importance: ImportanceMode = "truncate"
    """Importance ratios of tokens that older weights sampled: truncate them at importance_cap, mask
    tokens beyond it, icepop: mask those below importance_floor too, none: ratio 1, no clipping."""
    importance_cap: float = Field(2.0, gt=0, allow_inf_nan=False)
    """Greatest importance ratio of a token."""
    importance_floor: float = Field(0.5, ge=0)
    """Least ratio that icepop trains on."""
    staleness_decay: Share = 1.0
    """Factor on a token's weight for each version it is behind; 1: none."""
    advantage_epsilon: float = Field(1e-4, gt=0)
    """Added to the standard deviation of rewards."""
    loss_aggregation: LossAggregation = "algorithm"
    """Average token losses over the step, over each rollout, sum them per rollout, or divide by the
    constant loss_length. algorithm: as published with the algorithm."""
    loss_length: int = Field(0, ge=0)
    """Divisor of the constant aggregation: the most tokens that a rollout may sample."""
    overlong_tokens: int = Field(0, ge=0)
    """Rollouts with more trainable tokens lose 1 of their reward (DAPO's soft penalty); 0: off."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Tokens before overlong_tokens over which that penalty grows linearly."""
    mask_truncated: bool = False
    """Do not train on rollouts that a limit of tokens or of the environment cut off (overlong
    filtering of DAPO). Their rewards count for the baseline of their group."""
    bootstrap_truncated: bool = False
    """With a critic: add the value of the last state to the rewards of a rollout that a limit cut
    off; without, such a state is worth 0."""
    beta: float = Field(0.1, gt=0)
    """beta of dpo and tba: reward per unit of distance from the reference."""
    discount: Share = 1.0
    """gamma of algorithms with a critic: value of a reward one action earlier."""
    gae_lambda: Share = 0.95
    """lambda of generalised advantages: 1 trusts rewards alone, 0 the critic."""
    value_weight: float = Field(0.5, ge=0)
    """Weight of the critic's squared error in the loss."""
    macro_action_tokens: int = Field(5, gt=0)
    """Tokens of an action of ma_ppo."""
    num_epochs: int = Field(1, gt=0)
    """Times that a step trains on its batch."""
    num_mini_batches: int = Field(1, gt=0)
    """Parts of whole groups into which each epoch cuts the batch, with an update after each. With
    more than one update the proximal policy, whose trust region holds, and the critic's values are
    those at the start of the step."""
    critic_learning_rate: float = Field(0.0, ge=0)
    """Learning rate of the critic; 0: that of the optimizer for a model, thirty times that for a
    layer."""

    @property
    def several_updates(self) -> bool:
        """Whether a step updates the weights more than once."""
        return self.num_epochs * self.num_mini_batches > 1

    @property
    def trained_reward(self) -> str:
        """Name of the trained reward of a sample; a weighted sum has a name that no part has."""
        return self.reward or ("weighted_sum" if "reward" in self.reward_weights else "reward")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.importance_floor < self.importance_cap:
            raise ValueError(
                f"importance_cap is {self.importance_cap}: give a number above the "
                f"{self.importance_floor} of importance_floor"
            )
        if self.overlong_buffer_tokens > self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer_tokens is {self.overlong_buffer_tokens}: give at most the "
                f"{self.overlong_tokens} of overlong_tokens"
            )
        if self.mask_truncated and self.bootstrap_truncated:
            raise ValueError(
                "mask_truncated and bootstrap_truncated are both true: a rollout that is not "
                "trained needs no value, set one of them to false"
            )
        return self


class KLConfig(Settings):
    """Distance from the frozen model of algorithm.reference_column."""

    loss: float = Field(0.0, ge=0)
    """Weight of the distance in the loss."""
    reward: float = Field(0.0, ge=0)
    """Weight of a rollout's distance, summed over its sampled tokens, in its reward."""
    estimator: KLEstimator = "k3"
    """Estimator in the loss. k2: half the squared difference of log-probs; k3: as in GRPO."""
    reward_estimator: KLEstimator = "k1"
    """Estimator in the reward. k1: the difference of log-probs, whose gradient is that of the KL;
    k2 and k3 hardly act on a policy near its reference."""


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """Highest learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or along a line or half a cosine from the full rate, at the last
    step of the warm-up or at the first one, to final_share for the step after the last one."""
    final_share: Share = 0.0
    """Share of the learning rate at which linear and cosine end."""
    warmup_steps: int = Field(0, ge=0)
    """First steps, over which the learning rate grows linearly: step k of w has k/w of it, so that
    none has 0. 0: the first step has the full rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, of all parameters but norms and biases."""
    beta1: Decay = 0.9
    """Decay of the mean gradient."""
    beta2: Decay = 0.95
    """Decay of the mean squared gradient."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm; the metric grad_scale is below 1 where they were."""


class LoRAConfig(Settings):
    """Low-rank adapters on frozen weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0: train the weights. Learning rates are about ten times higher."""
    alpha: float = Field(0.0, ge=0)
    """Adapters are scaled by alpha / rank; 0: twice the rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers that get one, such as q_proj, or their last parts, such as
    self_attn.q_proj; none: all of attention, dense MLPs and shared experts, not the output. Routed
    experts, which are stacked into one tensor, and routers stay frozen."""
