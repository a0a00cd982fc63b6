"""Makes a model of two layers with random weights, and its tokenizer of single letters, in seconds.

It can learn the example's task and nothing else: use a Hugging Face folder for a task of your own.
"""

import argparse
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


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


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Random weights of about 50,000 parameters."""
    torch.manual_seed(seed)
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


def main() -> None:
    """Write OUT/model; the launcher calls this once for each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tokenizer = make_tokenizer()
    make_model(tokenizer, given.seed).save_pretrained(given.out / "model")
    tokenizer.save_pretrained(given.out / "model")


if __name__ == "__main__":
    main()
