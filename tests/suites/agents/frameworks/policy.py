"""A small policy that knows the frameworks' requests: it is taught the recorded ones by heart."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.suites.agents.frameworks.installed import AGENTS
from tests.suites.agents.frameworks.replay import FOLDER, recorded_requests, replayed
from tests.suites.agents.frameworks.teacher import FAMILY, taught_world

_VOCABULARY = 1024
_MOST_EPOCHS = 400
_LEAST_PROBABILITY = 0.9
"""Of each token of each answer, at the end."""
_LEARNING_RATE = 2e-3

Lesson = tuple[Sequence[int], Sequence[int]]
"""Ids of a prompt and of its answer."""


def make_policy(folder: Path, seed: int) -> dict[str, float]:
    """Write a model folder; returns figures of its training.

    Raises:
        RuntimeError: it has not learned all answers.
    """
    began = time.monotonic()
    _tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    lessons = asyncio.run(_lessons(folder))
    torch.manual_seed(seed)
    model = _model(PreTrainedTokenizerFast.from_pretrained(folder))
    epochs = _train(model, lessons)
    model.save_pretrained(folder)
    return {
        "lessons": len(lessons),
        "lesson_tokens": sum(len(prompt) + len(answer) for prompt, answer in lessons),
        "epochs": epochs,
        "training_seconds": round(time.monotonic() - began, 1),
    }


def _tokenizer() -> PreTrainedTokenizerFast:
    """Words of the requests; no token reaches over a word's end, so no cut of a text matters."""
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex("[A-Za-z]+|[^A-Za-z]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [(FOLDER / f"{name}.json").read_text("utf-8") for name in AGENTS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in FAMILY.special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in FAMILY.others])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=FAMILY.special[0]
    )
    fast.chat_template = FAMILY.chat_template.replace("↵", "{{ '\\n' }}")
    return fast


async def _lessons(model: Path) -> list[Lesson]:
    """The prompts of the recorded requests, as the gateway makes them, and their answers."""
    lessons: list[Lesson] = []
    with tempfile.TemporaryDirectory() as scratch:
        async with taught_world(Path(scratch), model) as (found, server):
            for name in AGENTS:
                await replayed(recorded_requests(name), found, server)
                for turn in (await found.recorded()).values():
                    ids = list(turn.tokens.token_ids)
                    number = len(ids) - sum(s.num_tokens for s in turn.tokens.spans[1:])
                    lessons.append((server.prompts[len(lessons)], ids[number:]))
    return lessons


def _model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=8192,
        initializer_range=0.06,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _train(model: Qwen3ForCausalLM, lessons: Sequence[Lesson]) -> int:
    """Train until every token of every answer is likely; returns the number of epochs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95))
    for epoch in range(1, _MOST_EPOCHS + 1):
        least = 1.0
        optimizer.zero_grad()
        for prompt, answer in lessons:
            logprobs = _logprobs(model, prompt, answer)
            (-logprobs.mean() / len(lessons)).backward()  # type: ignore[no-untyped-call]
            least = min(least, logprobs.min().exp().item())
        if least > _LEAST_PROBABILITY:
            return epoch
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if epoch % 20 == 0:
            print(json.dumps({"epoch": epoch, "least_probability": round(least, 3)}), flush=True)
    raise RuntimeError(f"after {_MOST_EPOCHS} epochs a token has probability {least:.2f}")


def _logprobs(
    model: Qwen3ForCausalLM, prompt: Sequence[int], answer: Sequence[int]
) -> torch.Tensor:
    """Log-probability of each token of an answer: (len(answer),)."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor([answer]).T)[:, 0]
