"""Make the quickstart's model, tokenizer and tasks; give the model a short supervised warm start.

    python -m examples.quickstart.prepare --out runs/demo/start --seed 0

The model first sees a faultless teacher and then a sloppy one, that often waits before it sets off.
What is left for reinforcement learning is to drop that habit without forgetting the floors.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.quickstart import task

__all__ = [
    "WORDS",
    "Demonstration",
    "WarmStart",
    "build_model",
    "build_tokenizer",
    "main",
    "make_start",
    "plain_text",
    "warm_start",
]

# Appending a message appends text: a turn is a continuation of what the engine has cached.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS = ("user:", "assistant:", "at", "up", "down", "to", task.WAIT)
_IGNORED = -100
_RECIPE = "prepared.json"
"""Of what a folder was made; written last."""

Demonstration = Callable[[task.Payload, Sequence[str]], Iterator[tuple[str, str]]]
"""From a task and its answers to (prompt, answer) of each turn, as the template renders them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """How the supervised warm start goes."""

    steps: int = 950
    """Optimizer steps."""
    noisy_share: float = 0.12
    """The last part of the steps, in which the teacher is sloppy."""
    noise: float = 0.58
    """Probability that the sloppy teacher waits before it sets off."""
    batch_size: int = 64
    """Demonstrations in a step; all of about the same length."""
    learning_rate: float = 4e-3
    """Highest rate; it rises for 20 steps and then falls linearly to a tenth."""


@dataclass(frozen=True, slots=True)
class _Example:
    token_ids: list[int]
    labels: list[int]


def build_tokenizer(
    words: Sequence[str] = WORDS, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each floor and word, and an append-only template."""
    words = ["<pad>", "<eos>", "<unk>", *words, *map(task.floor_name, range(task.FLOORS))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def build_model(vocabulary_size: int, seed: int) -> Qwen3ForCausalLM:
    """Return a freshly initialised Qwen3 of about 130 thousand parameters, in float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=1024,
        # Such a narrow model starts far too quietly at the usual 0.02.
        initializer_range=0.08,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def plain_text(payload: task.Payload, answers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Answers that are the floors and nothing else, as `CHAT_TEMPLATE` renders them."""
    for turn, answer in enumerate(answers):
        asked = task.user_message(payload, turn)
        yield f"user: {asked} <eos> assistant:", f"{answer} <eos>"


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    plan: WarmStart,
    seed: int,
    demonstration: Demonstration = plain_text,
) -> float:
    """Train `model` in place on demonstrations of training tasks; returns the last mean loss."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
    )
    losses: list[float] = []
    batches = _batches(tokenizer, plan, seed, demonstration)
    for step, batch in enumerate(track(batches, description="warm start", total=plan.steps)):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(plan, step)
        loss = _loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-50:]) / len(losses[-50:])


def _learning_rate(plan: WarmStart, step: int) -> float:
    return plan.learning_rate * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / plan.steps)


def _batches(
    tokenizer: PreTrainedTokenizerFast, plan: WarmStart, seed: int, demonstration: Demonstration
) -> Iterator[list[_Example]]:
    rng = random.Random(seed)
    noisy = round(plan.noisy_share * plan.steps)
    payloads = task.tasks(seed, plan.steps * plan.batch_size, "train")
    ids: dict[str, int] = tokenizer.get_vocab()
    for steps, noise in ((plan.steps - noisy, 0.0), (noisy, plan.noise)):
        pool = [
            _example(ids, demonstration(payload, task.demonstration(payload, rng, noise)))
            for payload, _ in zip(payloads, range(steps * plan.batch_size), strict=False)
        ]
        yield from _bucketed(pool, plan.batch_size, rng)


def _bucketed(
    pool: list[_Example], batch_size: int, rng: random.Random
) -> Iterator[list[_Example]]:
    pool.sort(key=lambda example: len(example.token_ids))
    starts = list(range(0, len(pool), batch_size))
    rng.shuffle(starts)
    for start in starts:
        yield pool[start : start + batch_size]


def _example(ids: Mapping[str, int], turns: Iterator[tuple[str, str]]) -> _Example:
    # Only answers and their terminators are learnt. Rendered turn by turn, as the agent does.
    token_ids: list[int] = []
    labels: list[int] = []
    for asked, answer in turns:
        prompt, answered = [ids[w] for w in asked.split()], [ids[w] for w in answer.split()]
        token_ids += prompt + answered
        labels += [_IGNORED] * len(prompt) + answered
    return _Example(token_ids, labels)


def _loss(model: Qwen3ForCausalLM, batch: Sequence[_Example]) -> torch.Tensor:
    longest = max(len(example.token_ids) for example in batch)
    tokens = _padded([example.token_ids for example in batch], longest, 0)
    labels = _padded([example.labels for example in batch], longest, _IGNORED)
    # Padding is on the right of causal attention, so no mask is needed.
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
    )


def _padded(rows: Sequence[list[int]], length: int, value: int) -> torch.Tensor:
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])


def _write_tasks(path: Path, split: task.Split, seed: int, count: int) -> None:
    # Held-out tasks are all different, so that the success rate counts none twice.
    seen: set[str] = set()
    with path.open("w", encoding="utf-8") as file:
        for number, payload in enumerate(task.tasks(seed, 2 * count, split)):
            name = task.task_name(payload)
            if len(seen) == count or (split == "heldout" and name in seen):
                continue
            seen.add(name if split == "heldout" else str(number))
            line = {"task_id": f"{split}-{number}-{name}", "payload": payload}
            file.write(json.dumps(line) + "\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a model, its tokenizer and tasks.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--made", type=Path, help="folder that may hold the same start already")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-tasks", type=int, default=4000)
    parser.add_argument("--heldout-tasks", type=int, default=256)
    return parser.parse_args(argv)


def make_start(
    tokenizer: PreTrainedTokenizerFast,
    plan: WarmStart,
    demonstration: Demonstration,
    argv: Sequence[str] | None,
) -> int:
    """Write model/, tasks-train.jsonl and tasks-heldout.jsonl; print a JSON summary.

    A folder in which the same start is complete is left as it is; else it is copied from `--made`,
    if it is complete there.
    """
    args = _arguments(argv)
    counts: dict[task.Split, int] = {"train": args.train_tasks, "heldout": args.heldout_tasks}
    start = {"seed": args.seed, "tasks": counts, "warm_start": asdict(plan)}
    recipe = json.dumps({**start, "demonstration": demonstration.__name__})
    if _is_made(args.out, recipe):
        print(json.dumps({"kept": str(args.out), **start}))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / _RECIPE).unlink(missing_ok=True)
    if _is_made(args.made, recipe):
        shutil.copytree(args.made, args.out, dirs_exist_ok=True)
        print(json.dumps({"copied": str(args.made), **start}))
    else:
        print(json.dumps({**_make(args, tokenizer, plan, demonstration, counts), **start}))
        (args.out / _RECIPE).write_text(recipe)
    return 0


def _is_made(folder: Path | None, recipe: str) -> bool:
    """Whether this very start is complete in `folder`."""
    made = folder / _RECIPE if folder is not None else None
    return made is not None and made.exists() and made.read_text() == recipe


def _make(
    args: argparse.Namespace,
    tokenizer: PreTrainedTokenizerFast,
    plan: WarmStart,
    demonstration: Demonstration,
    counts: Mapping[task.Split, int],
) -> dict[str, float]:
    began = time.monotonic()
    model = build_model(len(tokenizer), args.seed)
    loss = warm_start(model, tokenizer, plan, args.seed, demonstration)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    for split, count in counts.items():
        _write_tasks(args.out / f"tasks-{split}.jsonl", split, args.seed + 1, count)
    return {"seconds": round(time.monotonic() - began, 1), "loss": round(loss, 4)}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the start of the quickstart."""
    return make_start(build_tokenizer(), WarmStart(), plain_text, argv)


if __name__ == "__main__":
    raise SystemExit(main())
