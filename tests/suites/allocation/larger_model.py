"""The quickstart's tokenizer and tasks with a model whose steps take as long as generation does."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.quickstart.prepare import build_tokenizer
from tests.lib.end_to_end.quickstart_files import make_quickstart

__all__ = ["main"]


def main() -> None:
    """Make them in the folder of --out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int)
    folder = parser.parse_args().out
    folder.mkdir(exist_ok=True)
    make_quickstart(folder)
    config = Qwen3Config(
        vocab_size=len(build_tokenizer()),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")


if __name__ == "__main__":
    main()
