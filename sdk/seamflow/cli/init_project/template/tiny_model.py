"""Makes a model of two layers that knows half of the task, and its tokenizer, in ten seconds.

It has learned to answer a word with one of its letters, whichever. It can learn the example's task
and nothing else: use a Hugging Face folder for a task of your own.
"""

import argparse
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
LETTERS = 4  # of a word
STEPS, BATCH = 400, 128


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each lower-case letter, and for the end of a message."""
    vocabulary = {text: i for i, text in enumerate(["<pad>", "<eos>", *string.ascii_lowercase])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights of about 80,000 parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def conversations(tokenizer: PreTrainedTokenizerFast, number: int) -> torch.Tensor:
    """Ids of conversations in which a word is answered with one of its letters."""

    def ids(*texts: str) -> torch.Tensor:
        return torch.tensor(tokenizer.convert_tokens_to_ids(list(texts)))

    words = ids(*string.ascii_lowercase)[torch.randint(26, (number, LETTERS))]
    answers = words.gather(1, torch.randint(LETTERS, (number, 1)))
    user, assistant, end = (
        ids(*texts).expand(number, -1) for texts in ("u", ("<eos>", "a"), ("<eos>",))
    )
    return torch.cat([user, words, assistant, answers, end], dim=1)


def teach(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised training on such conversations; the loss is that of the answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, STEPS + 1):
        batch = conversations(tokenizer, BATCH)
        labels = batch.clone()
        labels[:, :-2] = -100
        loss = model(input_ids=batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"  step {step} of {STEPS}: loss {loss.item():.2f}", flush=True)


def main() -> None:
    """Write OUT/model; the launcher calls this once for each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    logging.disable_progress_bar()
    print("  teaching the tiny model to answer with a letter of the word", flush=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    teach(model, tokenizer)
    model.save_pretrained(given.out / "model")
    tokenizer.save_pretrained(given.out / "model")


if __name__ == "__main__":
    main()
