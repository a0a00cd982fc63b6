"""`make bench-ranker`, second part: rankers on real answers of SmolLM2, and what they are worth.

The answers, four to each prompt, are generated once and kept in runs/real_lengths. The hashed
ranker, a frozen SmolLM2 with a head and one with trained layers are fitted to four fifths of the
prompts and rank the others. With these predictions two and four engines generate batches of the
same lengths, in order of arrival, longest first and skew-aware.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from seamflow.cli.init_project.language_model import model_folder

from bench.real_lengths.batch_seconds import Engines, order_seconds, orders_of
from bench.real_lengths.generations import Generated, generations
from bench.real_lengths.prompts import load_workload
from bench.real_lengths.recalls import chance, predicted_tokens, recall, recall_by_other_answers
from bench.report import Report, ratios
from bench.rollout.generation import save_model
from services.ranker.config import LanguageModelConfig
from services.ranker.language_model import LanguageModelRegression
from services.ranker.regression import HASHED, Regression

SEEDS = (11, 12, 13)
DRAWS = (1, 2)
ANSWERS = 4
ENGINES = {2: 8, 4: 4}
"""Engines of a fleet, and slots of each."""
BATCH = 48
MIN_ROUNDS = 3

_Floats = NDArray[np.float64]


def main() -> None:
    """Generate, rank, time and publish; then train layers, which takes longest, and publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the folds")
    parser.add_argument("--draws", type=int, nargs="+", default=DRAWS, help="of 240 prompts each")
    parser.add_argument("--trained-seeds", type=int, default=len(SEEDS), help="with trained layers")
    parser.add_argument("--rounds", type=int, default=5, help="batches of each fleet, at least 3")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder, workload = model_folder("smollm2"), load_workload()
    limit = workload["max_new_tokens"]
    answers = [
        each
        for draw in arguments.draws
        for each in generations(folder, workload, seed=draw, num_answers=ANSWERS)
    ]
    raw: dict[str, list[float]] = {}
    head = LanguageModelConfig(model=folder, trained_layers=0)
    rankers: dict[str, Regression] = {
        "hashed": HASHED,
        "language_model": LanguageModelRegression(head),
    }
    predicted = {
        name: _recalls(name, regression, answers, arguments.seeds, raw)
        for name, regression in rankers.items()
    }
    batches = _batches(answers, predicted, arguments.rounds, limit, raw)
    _publish(_recall_figures(answers, raw, limit) | batches, raw, arguments.seeds)
    if seeds := arguments.seeds[: arguments.trained_seeds]:
        trained = LanguageModelRegression(LanguageModelConfig(model=folder, trained_layers=2))
        _recalls("trained_layers", trained, answers, seeds, raw)
        _publish(_recall_figures(answers, raw, limit) | batches, raw, arguments.seeds)


def _publish(
    figures: Mapping[str, float], raw: Mapping[str, Sequence[float]], seeds: Sequence[int]
) -> None:
    packages = ("torch", "transformers", "scikit-learn")
    Report(
        bench="ranker_language_model", figures=figures, raw=raw, seeds=seeds, packages=packages
    ).publish()


def _recalls(
    name: str,
    regression: Regression,
    answers: Sequence[Generated],
    seeds: Sequence[int],
    raw: dict[str, list[float]],
) -> _Floats:
    """Recall of a ranker with each seed; the predictions with the first one."""
    predicted: list[_Floats] = []
    for seed in seeds:
        predicted.append(predicted_tokens(regression, answers, seed))
        raw.setdefault(f"{name}_recall", []).append(recall(predicted[-1], answers))
        print(name, seed, raw[f"{name}_recall"][-1], flush=True)
    return predicted[0]


def _recall_figures(
    answers: Sequence[Generated], raw: Mapping[str, Sequence[float]], limit: int
) -> dict[str, float]:
    lengths = np.array([answer.lengths for answer in answers])
    means = {name: float(np.mean(raw[name])) for name in raw if "_engines_" not in name}
    return {
        **means,
        "recall_by_chance": chance(answers),
        "recall_by_other_answers": recall_by_other_answers(answers),
        "prompts": float(len(answers)),
        "answers_to_each": float(ANSWERS),
        "median_tokens": float(np.median(lengths)),
        "share_at_limit": float((lengths >= limit).mean()),
    }


def _batches(
    answers: Sequence[Generated],
    predicted: Mapping[str, _Floats],
    rounds: int,
    limit: int,
    raw: dict[str, list[float]],
) -> dict[str, float]:
    """Seconds of each order on each fleet over those of FIFO in the same round."""
    with tempfile.TemporaryDirectory() as base:
        model = save_model(Path(base), "5m")
        for number, slots in ENGINES.items():
            found = asyncio.run(_rounds(model, number, slots, answers, predicted, rounds, limit))
            raw |= {f"{number}_engines_{name}_seconds": each for name, each in found.items()}
    figures: dict[str, float] = {}
    for number in ENGINES:
        fifo = raw[f"{number}_engines_fifo_seconds"]
        for name in (each for each in raw if each.startswith(f"{number}_engines_")):
            short = name.removesuffix("_seconds")
            figures[name] = median(raw[name])
            if short != f"{number}_engines_fifo":
                figures |= ratios(f"{short}_vs_fifo", raw[name], fifo, MIN_ROUNDS)
    return figures


async def _rounds(
    model: Path,
    number: int,
    slots: int,
    answers: Sequence[Generated],
    predicted: Mapping[str, _Floats],
    rounds: int,
    limit: int,
) -> dict[str, list[float]]:
    raw: dict[str, list[float]] = {}
    async with Engines(model, number, slots) as engines:
        for seed in range(rounds):
            drawn = np.random.default_rng(seed).choice(len(answers), BATCH, replace=False)
            batch = [answers[i] for i in drawn]
            rankers = {name: found[drawn].tolist() for name, found in predicted.items()}
            for name, seconds in (
                await order_seconds(engines, batch, orders_of(batch, rankers, limit))
            ).items():
                raw.setdefault(name, []).append(seconds)
                print(number, seed, name, seconds, flush=True)
    return raw


if __name__ == "__main__":
    main()
