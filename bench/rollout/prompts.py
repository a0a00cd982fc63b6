"""Prompts made of token ids whose answers' lengths depend on them, by `workloads/lengths.toml`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORKLOAD = Path(__file__).parents[1] / "workloads" / "lengths.toml"


def load_workload(path: Path = WORKLOAD) -> dict[str, Any]:
    """The file's tables."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts and what only an oracle knows of them."""

    token_ids: list[list[int]]
    """Of each."""
    mean_log_lengths: NDArray[np.float64]
    """True conditional mean of the log length of its answers, shape [n]."""


class PromptWorld:
    """Draws prompts and the lengths of answers to them; the same seed draws the same."""

    def __init__(self, workload: Mapping[str, Any], seed: int) -> None:
        self._lengths, self._settings = workload["lengths"], workload["prompts"]
        self._random = np.random.default_rng(seed)
        num_topics, per_topic = self._settings["topics"], self._settings["words_per_topic"]
        num_markers = self._settings["markers"]
        ids = self._random.permutation(self._settings["vocabulary"])
        self._topics = ids[: num_topics * per_topic].reshape(num_topics, per_topic)
        self._markers = ids[self._topics.size : self._topics.size + num_markers]
        first_plain = self._topics.size + num_markers
        self._plain = ids[first_plain : first_plain + 10 * per_topic]
        self._topic_effects = self._random.normal(size=num_topics)
        self._sensitivities = self._random.uniform(0.3, 1.7, num_topics)
        self._marker_effects = self._random.normal(size=num_markers)
        # Sums of random effects of one world have some mean and spread: here they become known.
        raw = np.array([self._draw()[1] for _ in range(2048)])
        self._centre, self._spread = float(raw.mean()), float(raw.std())

    def prompts(self, number: int) -> Prompts:
        """Further prompts."""
        drawn = [self._draw() for _ in range(number)]
        between = math.sqrt(self._lengths["sd_log"] ** 2 - self._lengths["sd_log_answers"] ** 2)
        raw = np.array([effect for _, effect in drawn])
        means = math.log(self._lengths["median"]) + between * (raw - self._centre) / self._spread
        return Prompts(token_ids=[ids for ids, _ in drawn], mean_log_lengths=means)

    def answers(self, prompts: Prompts, group_size: int) -> NDArray[np.float64]:
        """Tokens of `group_size` answers to each of n prompts, shape [n, group_size]."""
        noise = self._random.normal(size=(len(prompts.token_ids), group_size))
        logs = prompts.mean_log_lengths[:, None] + self._lengths["sd_log_answers"] * noise
        lengths: NDArray[np.float64] = np.clip(np.rint(np.exp(logs)), 1, self._lengths["max"])
        return lengths

    def _draw(self) -> tuple[list[int], float]:
        """Ids of a prompt, and what its topic and markers do to the length of its answers."""
        settings, random = self._settings, self._random
        topic = int(random.integers(len(self._topics)))
        length = int(random.integers(settings["min_tokens"], settings["max_tokens"] + 1))
        number = int(random.integers(settings["max_markers"] + 1))
        markers = random.choice(len(self._markers), number, replace=False)
        plain = random.random(length) < settings["plain_share"]
        ids = np.where(
            plain, self._word(self._plain, length), self._word(self._topics[topic], length)
        )
        ids[random.choice(length, number, replace=False)] = self._markers[markers]
        effect = self._sensitivities[topic] * self._marker_effects[markers].sum()
        return ids.tolist(), float(self._topic_effects[topic] + effect)

    def _word(self, words: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Words by Zipf's law, shape [number]."""
        shares = 1.0 / np.arange(1, len(words) + 1)
        return self._random.choice(words, number, p=shares / shares.sum())
