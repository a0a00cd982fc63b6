"""The model of the throughput workloads: 4.7 million random weights, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from bench.baselines.generation.workload import VOCABULARY
from bench.rollout.generation import SIZES, model_config
from bench.train.task import WORDS
from examples.quickstart.prepare import CHAT_TEMPLATE

# In the order that the model's configuration has them in.
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")


def save_model(folder: Path, seed: int) -> Path:
    """Save a Qwen3 of `bench.rollout.generation`'s size 5m and a tokenizer of the task's words."""
    torch.manual_seed(seed)
    Qwen3ForCausalLM(model_config(SIZES["5m"])).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word; words that mean nothing fill the vocabulary up."""
    known = (*_SPECIAL, *WORDS)
    words = (*known, *(f"w{number}" for number in range(VOCABULARY - len(known))))
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
