"""`transformers`' own `generate`: batches in order of arrival, each row stopped at its length.

A driver: see `bench.baselines.generation.workload`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from bench.baselines.generation.workload import Case, serve


class _Lengths(StoppingCriteria):
    """Ends each row at the length its request has drawn."""

    def __init__(self, prompt: int, lengths: list[int]) -> None:
        self._ends = torch.tensor(lengths) + prompt

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def load(folder: Path, _rows: int) -> Any:
    """Load the model for any number of rows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def generate(model: Any, case: Case) -> None:
    """Sample every request of `case`."""
    for first in range(0, len(case.prompts), case.rows):
        prompts = torch.tensor(case.prompts[first : first + case.rows])
        lengths = case.lengths[first : first + case.rows]
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(lengths),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([_Lengths(prompts.shape[1], lengths)]),
        )


if __name__ == "__main__":
    serve(load, generate)
