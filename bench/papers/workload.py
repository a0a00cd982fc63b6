"""The work of all sides: the quickstart's task for an untrained model that keeps a core busy.

The quickstart's own model is so small that services take as long as engines. An untrained model
ends its answers by chance, so that a few are many times as long as the median one.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.quickstart import task
from examples.quickstart.prepare import build_tokenizer

_TASKS = 4000


def make_workload(folder: Path, seed: int) -> None:
    """Write model/ and tasks.jsonl."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [
        json.dumps({"task_id": f"{number}-{task.task_name(payload)}", "payload": payload})
        for number, payload in enumerate(task.tasks(seed, _TASKS, "train"))
    ]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
