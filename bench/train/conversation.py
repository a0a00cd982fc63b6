"""Rollouts of several turns for TRL, whose trainer generates one turn for each prompt.

The tokens are those that our gateway records: each answer as it was sampled, each message of the
user rendered after it. No dependencies beyond the tokenizer that is handed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, str]
"""{"role": "user", "content": "…"}"""


@dataclass(slots=True)
class Conversation:
    """A rollout of several turns, as tokens."""

    messages: Sequence[Message]
    """The user's messages, turn by turn."""
    token_ids: list[int] = field(default_factory=list)
    """All tokens so far."""
    sampled: list[int] = field(default_factory=list)
    """1 for those that the model sampled, 0 for the user's."""
    answers: list[str] = field(default_factory=list)
    """The model's messages, turn by turn."""

    def ask(self, tokenizer: Any) -> None:
        """Append the next message of the user, and whatever ends an answer that was cut."""
        message = [self.messages[len(self.answers)]]
        asked = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
        if self.token_ids and self.token_ids[-1] != tokenizer.eos_token_id:
            asked = [tokenizer.eos_token_id, *asked]
        self.token_ids += asked
        self.sampled += [0] * len(asked)

    def answer(self, token_ids: list[int], tokenizer: Any) -> None:
        """Append an answer."""
        self.token_ids += token_ids
        self.sampled += [1] * len(token_ids)
        self.answers.append(tokenizer.decode(token_ids, skip_special_tokens=True))


def play(prompts: Sequence[Sequence[Message]], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func`: all turns of each prompt, each generated as TRL generates one."""
    tokenizer = trainer.processing_class
    rollouts = [Conversation(messages) for messages in prompts]
    for _ in prompts[0]:
        for each in rollouts:
            each.ask(tokenizer)
        contexts = [each.token_ids for each in rollouts]
        answers, _ = trainer._generate_single_turn(contexts, None, {}, trainer.num_generations)
        for each, token_ids in zip(rollouts, answers, strict=True):
            each.answer(token_ids, tokenizer)
    firsts = [each.sampled.index(1) for each in rollouts]
    parts = list(zip(rollouts, firsts, strict=True))
    return {
        "prompt_ids": [each.token_ids[:first] for each, first in parts],
        "completion_ids": [each.token_ids[first:] for each, first in parts],
        "logprobs": None,  # of the very weights that are trained
        "env_mask": [each.sampled[first:] for each, first in parts],
        "num_sampled": [sum(each.sampled) for each in rollouts],
        "answers": [each.answers for each in rollouts],
    }
