"""Make a small model of letters for reasoning-gym's spell_backward, with a short warm start.

The warm start shows random strings of letters, no words of the dataset; towards its end the teacher
often errs, so that there is something to learn. Held-out tasks are entries of another seed.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.quickstart.prepare import build_model

__all__ = ["build_tokenizer", "main", "warm_start"]

QUESTION = "Spell this word backward (example: sun -> nus): "
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
LETTERS = string.ascii_lowercase
HELDOUT_SEED = 1_000_000
"""Far from the training seed: entry i of a dataset has the seed of the dataset plus i."""
STEPS, BATCH_SIZE, LEARNING_RATE = 700, 64, 4e-3
NOISY_SHARE, NOISE = 0.12, 0.6
"""Last part of the steps, in which the teacher errs, and the probability of an error."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, and one for the whole question before the word."""
    characters = [*LETTERS, *string.ascii_uppercase, *string.digits, *"-'"]
    vocabulary = {text: i for i, text in enumerate(["<pad>", "<eos>", QUESTION, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106
    pieces = QUESTION.replace("(", r"\(").replace(")", r"\)") + "|."
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Train `model` in place on strings and what a teacher, sloppy at the end, makes of them."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / STEPS)
        noise = NOISE if step >= STEPS * (1 - NOISY_SHARE) else 0.0
        ids, labels = _batch(tokenizer, _examples(rng, noise))
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _examples(rng: random.Random, noise: float) -> Iterator[tuple[str, str]]:
    """Strings of one length, and answers."""
    length = rng.randint(3, 6)
    for _ in range(BATCH_SIZE):
        word = "".join(rng.choices(LETTERS, k=length))
        answer = list(reversed(word))
        if rng.random() < noise:
            first, second = rng.sample(range(length), 2)
            answer[first], answer[second] = answer[second], answer[first]
        yield word, "".join(answer)


def _batch(
    tokenizer: PreTrainedTokenizerFast, examples: Iterator[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and the same with everything masked but the answers and their ends."""
    rows, labels = [], []
    for word, answer in examples:
        user = [{"role": "user", "content": QUESTION + word}]
        text = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        said = tokenizer(answer + "<eos>", add_special_tokens=False)["input_ids"]
        rows.append(prompt + said)
        labels.append([-100] * len(prompt) + said)
    return torch.tensor(rows), torch.tensor(labels)


def main(argv: Sequence[str] | None = None) -> None:
    """Write model/ and heldout.jsonl into the folder given."""
    parser = argparse.ArgumentParser(description="Make a model and held-out tasks.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer), given.seed)
    warm_start(model, tokenizer, given.seed)
    model.save_pretrained(given.out / "model")
    tokenizer.save_pretrained(given.out / "model")
    lines = (
        {"task_id": f"heldout-{i}", "payload": {"index": i, "seed": HELDOUT_SEED + given.seed}}
        for i in range(128)
    )
    (given.out / "heldout.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


if __name__ == "__main__":
    main()
