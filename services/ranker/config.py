"""Ranker settings, table [ranker]."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.chassis.config.settings import ServerConfig, Settings


class LanguageModelConfig(Settings):
    """The language model of a ranker of that kind, and how it is trained."""

    model: Path | None = None
    """Hugging Face folder of a small causal language model whose tokens are those of the run's
    prompts: the run's own model, or a smaller one with its tokenizer. Required for the kind."""
    trained_layers: int = Field(0, ge=0)
    """Last layers that are fine-tuned with the head, for thousands of prompts; 0: the head alone,
    which takes seconds and is better with hundreds."""
    epochs: int = Field(3, ge=1)
    """Passes over the prompts it learns from, in each training."""
    learning_rate: float = Field(1e-4, gt=0)
    """Of AdamW at the first step of a training; it falls to 0."""
    max_prompt_tokens: int = Field(256, ge=2)
    """Tokens of a prompt that are read: its first and its last half of them."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    threads: int = Field(1, ge=1)
    """CPU threads of a training, and of a prediction."""


class RankerConfig(ServerConfig):
    """Settings of the ranker."""

    run_id: str
    """Training job whose turns it learns from."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, which holds the recorded turns."""
    kind: Literal["hashed", "language_model"] = "hashed"
    """Ridge regressions on hashed words of the prompt, or a small language model with a head."""
    language_model: LanguageModelConfig = Field(default_factory=LanguageModelConfig)
    """For the kind language_model."""
    window_prompts: int = Field(4096, ge=16)
    """Newest prompts it learns from. Memory grows with their square (4,096: 0.3 GB), training time
    with their cube (4,096: some seconds of one core)."""
    train_every_turns: int = Field(512, ge=1)
    """Turns that end between two trainings."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "language_model") != (self.language_model.model is not None):
            raise ValueError(
                f"kind is {self.kind!r} and language_model.model is {self.language_model.model}: "
                'for a language model give its folder and kind = "language_model", else neither'
            )
        return self
