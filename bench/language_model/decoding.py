"""Decoding of the language model: embedded engine, transformers' `generate`, vLLM on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from seamflow.cli.init_project.language_model import model_folder

from bench.report import MIN_SAMPLES, Report
from bench.rollout.generation import PEERS, Comparison, measure, peers_of

_SIZE = "smollm2"
COMPARISONS = (
    *(
        Comparison(
            name=f"vllm_cpu_{_SIZE}_{rows}",
            size=_SIZE,
            rows=rows,
            requests=rows,
            tail=False,
            peer="vllm_cpu",
        )
        for rows in (1, 16, 64)
    ),
    Comparison(
        name=f"hf_generate_{_SIZE}_longtail",
        size=_SIZE,
        rows=16,
        requests=32,
        tail=True,
        peer="hf_generate",
    ),
)


def measure_decoding(seeds: Sequence[int]) -> None:
    """Compare, and publish; one thread for each engine."""
    torch.set_num_threads(1)
    folders = {_SIZE: model_folder(_SIZE)}
    figures, raw = measure(COMPARISONS, folders, MIN_SAMPLES, seeds[0])
    Report(
        bench="language_model_decoding",
        figures=figures,
        raw=raw,
        seeds=seeds[:1],
        peers=peers_of(tuple(PEERS)),
    ).publish()
