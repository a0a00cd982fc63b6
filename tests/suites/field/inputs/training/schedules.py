"""Learning rates over a run and weight decay, next to those of transformers' Trainer."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    Trainer,
    TrainingArguments,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from tests.lib.trainer.support import trainer_config
from tests.suites.field.kind import Kind
from tests.suites.field.tiny_models import TINY, make_config, make_model
from trainer.policy.optimizer import Optimizer, decayed_names, learning_rate

_SCHEDULES: Mapping[str, Callable[..., LambdaLR]] = {
    "constant": get_constant_schedule_with_warmup,
    "linear": get_linear_schedule_with_warmup,
    "cosine": get_cosine_schedule_with_warmup,
}
_RATE = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Settings of a run."""

    name: str
    steps: int
    warmup: int = 0
    final_share: float = 0.0


def _found(given: Schedule, steps: range) -> list[float]:
    """As a trainer computes them that starts, or is resumed, at the first of these steps."""
    config = trainer_config(
        run_id="run",
        model=Path(),
        checkpoint__folder=Path(),
        num_steps=given.steps,
        optimizer__learning_rate=_RATE,
        optimizer__schedule=given.name,
        optimizer__warmup_steps=given.warmup,
        optimizer__final_share=given.final_share,
    )
    return [learning_rate(config, step) for step in steps]


def _shares(given: Schedule) -> list[float]:
    """Shares of the learning rate in each step, by transformers."""
    shift = 1 if given.warmup else 0
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    lengths = () if given.name == "constant" else (given.steps + shift,)
    scheduler = _SCHEDULES[given.name](optimizer, given.warmup, *lengths)
    share = scheduler.lr_lambdas[0]
    return [share(step + shift) for step in range(given.steps)]


def _check(given: Schedule) -> None:
    found = _found(given, range(1, given.steps + 1))
    for step, (rate, share) in enumerate(zip(found, _shares(given), strict=True), 1):
        is_warmup = step < given.warmup
        right = share if is_warmup else given.final_share + (1 - given.final_share) * share
        if not math.isclose(rate, _RATE * right, rel_tol=1e-9, abs_tol=1e-15):
            raise AssertionError(f"step {step} has {rate / _RATE:.6f} of the rate, not {right:.6f}")
    full = max(given.warmup, 1)
    if full <= given.steps and found[full - 1] != _RATE:
        raise AssertionError(f"step {full} does not have the full rate")
    middle = 1 + given.steps // 2
    if _found(given, range(middle, given.steps + 1)) != found[middle - 1 :]:
        raise AssertionError(f"a run resumed at step {middle} has other rates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """Steps of an architecture, of whose parameters some have no gradient in some steps."""

    model: str
    bias: bool = False
    without_gradient: int = 2
    """Every so many parameters have none."""


def _gradients(model: torch.nn.Module, given: Decay, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(model.parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if (number + step) % given.without_gradient == 0 else values


def _check_decay(given: Decay) -> None:
    """Three steps of Trainer's own optimizer and of ours, from the same weights."""
    bias = {"attention_bias": True, "mlp_bias": True} if given.bias else {}
    ours, theirs = (make_model(make_config(given.model, **bias)) for _ in range(2))
    config = trainer_config(
        run_id="run",
        model=Path(),
        checkpoint__folder=Path(),
        optimizer__learning_rate=_RATE,
        optimizer__weight_decay=0.1,
    )
    optimizer = Optimizer(dict(ours.named_parameters()), config, decayed_names(ours, None))
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        learning_rate=_RATE,
        weight_decay=0.1,
        adam_beta2=config.optimizer.beta2,
        report_to="none",
        use_cpu=True,
    )
    reference = Trainer(model=theirs, args=arguments).create_optimizer()
    for step in range(3):
        _gradients(ours, given, step)
        optimizer.scale_gradients("", 1.0)
        optimizer.update(_RATE)
        _gradients(theirs, given, step)
        reference.step()
    for (name, found), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, right, msg=partial("{}: {}".format, name))


KINDS = (
    Kind(
        name="weight decay",
        check=_check_decay,
        examples=[Decay(model=model) for model in ("llama", "gpt2", "phi", "qwen3_moe", "cohere")],
        generated=st.builds(
            Decay,
            model=st.sampled_from(sorted(TINY)),
            bias=st.booleans(),
            without_gradient=st.integers(1, 5),
        ),
        short=3,
        long=100,
    ),
    Kind(
        name="learning rates",
        check=_check,
        examples=[
            Schedule(name=name, steps=steps, warmup=warmup)
            for name in ("linear", "cosine", "constant")
            for steps, warmup in ((10, 0), (1, 0), (10, 1), (10, 3), (4, 4), (3, 8))
        ],
        generated=st.builds(
            Schedule,
            name=st.sampled_from(("linear", "cosine", "constant")),
            steps=st.integers(1, 300),
            warmup=st.integers(0, 320),
            final_share=st.sampled_from((0.0, 0.1, 0.5, 1.0)),
        ),
    ),
)
