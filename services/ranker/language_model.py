"""Log length of an answer from a small language model with a head (StreamRL, section 4.2).

The head is a ridge regression on the model's pooled hidden states. With trained layers it is where
fine-tuning begins, as in linear probing then fine-tuning (arXiv 2202.10054): a random head would
spoil the layers in its first steps.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from services.chassis.log import get_logger
from services.ranker.config import LanguageModelConfig
from services.ranker.features import TurnStart
from services.ranker.prompt_encoder import PromptEncoder, batches, pooled
from services.ranker.regression import Prompt

if TYPE_CHECKING:
    import torch

_KEPT_MIB = 1024
"""Hidden states of prompts that are kept, so that each is computed once: 1 KiB a token for
SmolLM2-135M, and 5 KiB a prompt if no layer is trained."""

_Floats = NDArray[np.float64]

_log = get_logger()
_CURE = "set language_model.model to a model with the tokenizer of the run's model"
_PENALTIES = np.logspace(0, 6, 13)
_BATCH = 16
_SEED = 0


class LanguageModelRegression:
    """Each fit begins with the pretrained weights, so that fits do not drift. Same data, same fit.

    Raises:
        ValueError: the model cannot be loaded, or cannot be cut.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        import torch

        assert config.model is not None  # checked by RankerConfig
        torch.set_num_threads(config.threads)
        self._config = config
        self._half = config.max_prompt_tokens // 2
        self._has_warned = False
        self._encoder = PromptEncoder(
            config.model,
            config.trained_layers,
            device=config.device,
            max_kept=_KEPT_MIB << 20,
        )

    def read(self, start: TurnStart) -> Prompt:
        """Its token ids, at least one."""
        ids = np.asarray(start.token_ids, dtype=np.int32)
        if len(ids) > 2 * self._half:
            ids = np.concatenate([ids[: self._half], ids[-self._half :]])
        known = ids % self._encoder.vocab_size
        if not self._has_warned and (known != ids).any():
            self._has_warned = True
            _log.warning(
                "tokens_outside_vocabulary", vocab_size=self._encoder.vocab_size, cure=_CURE
            )
        return known if len(known) else np.zeros(1, np.int32)

    def fit(
        self, prompts: Sequence[Prompt], log_lengths: _Floats, num_answers: _Floats
    ) -> LanguageModel:
        """A first fit computes all prompts, a later one the new ones and the trained layers."""
        import torch

        torch.set_num_threads(self._config.threads)  # of this thread
        states = self._encoder.states(prompts)
        upper = copy.deepcopy(self._encoder.upper)
        model = LanguageModel(self._encoder, upper, None, self._config.device)
        head = _ridge_head(model.features(states), log_lengths, num_answers)
        model.head = head.to(self._config.device)
        if upper is not None:
            _fine_tune(model, states, log_lengths, num_answers, self._config)
        return model


class LanguageModel:
    """Trained layers and a head on an encoder."""

    def __init__(self, encoder: PromptEncoder, upper: Any, head: Any, device: str) -> None:
        """`upper` None: the encoder's states are features; `head` maps [B, 2H] to [B, 1]."""
        self._encoder = encoder
        self._device = device
        self.upper = upper
        self.head = head

    def predict(self, prompts: Sequence[Prompt]) -> _Floats:
        import torch

        states = self._encoder.states(prompts)
        features = torch.from_numpy(self.features(states)).to(self._device)
        with torch.no_grad():
            found: _Floats = self.head(features)[:, 0].cpu().double().numpy()
        return found

    def features(self, states: Sequence[torch.Tensor]) -> NDArray[np.float32]:
        """Features of the prompts with these states, shape [m, 2H]."""
        import torch

        if self.upper is None:
            return torch.stack(list(states)).numpy()
        found: list[Any] = [None] * len(states)
        with torch.no_grad():
            for batch in batches([len(each) for each in states]):
                rows = self.upper_features([states[i] for i in batch]).cpu().numpy()
                for i, row in zip(batch, rows, strict=True):
                    found[i] = row
        return np.stack(found)

    def upper_features(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Features of one batch by the trained layers, shape [B, 2H]."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        ones = [torch.ones(len(each), dtype=torch.long) for each in states]
        mask_BT = pad_sequence(ones, batch_first=True).to(self._device)
        states_BTH = pad_sequence(list(states), batch_first=True).to(self._device).float()
        return pooled(
            self.upper(
                inputs_embeds=states_BTH, attention_mask=mask_BT, use_cache=False
            ).last_hidden_state,
            mask_BT,
        )


def _ridge_head(features: NDArray[np.float32], log_lengths: _Floats, num_answers: _Floats) -> Any:
    """A linear layer; its penalty is the one with the smallest leave-one-out error."""
    import torch
    from sklearn.linear_model import RidgeCV
    from threadpoolctl import threadpool_limits

    mean, spread = features.mean(0), features.std(0) + 1e-6
    scaled = ((features - mean) / spread).astype(np.float64)
    with threadpool_limits(1):
        ridge = RidgeCV(alphas=_PENALTIES).fit(scaled, log_lengths, sample_weight=num_answers)
    weights = ridge.coef_ / spread
    head = torch.nn.Linear(len(weights), 1)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(weights)[None])
        head.bias.fill_(float(ridge.intercept_ - weights @ mean))
    return head


def _fine_tune(
    model: LanguageModel,
    states: Sequence[torch.Tensor],
    log_lengths: _Floats,
    num_answers: _Floats,
    tuning: LanguageModelConfig,
) -> None:
    """Minimize the squared error of log lengths, weighted by the number of answers."""
    import torch

    targets = torch.from_numpy(log_lengths).float().to(model.head.weight.device)
    weights = torch.from_numpy(num_answers).float().to(targets.device)
    parameters = [*model.upper.requires_grad_().parameters(), *model.head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=tuning.learning_rate)
    order = list(_order(len(states), tuning.epochs))
    for number, batch in enumerate(order):
        for group in optimizer.param_groups:
            group["lr"] = tuning.learning_rate * (1 - number / len(order))
        predicted = model.head(model.upper_features([states[i] for i in batch]))[:, 0]
        errors = (predicted - targets[batch]) ** 2 * weights[batch]
        (errors.sum() / weights[batch].sum()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.upper.requires_grad_(requires_grad=False)


def _order(number: int, epochs: int) -> Iterator[list[int]]:
    """Batches of indices in random order, each prompt once in an epoch.

    Not sorted by length: answers to prompts of one length may be alike, and steps biased.
    """
    random = np.random.default_rng(_SEED)
    for _ in range(epochs):
        order = random.permutation(number).tolist()
        for first in range(0, number, _BATCH):
            yield order[first : first + _BATCH]
