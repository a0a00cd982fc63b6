"""What the ranker remembers of a run, and what it makes of it."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from services.ranker.features import Beginning, Columns, columns
from services.ranker.regression import LengthModel

__all__ = ["LONGEST_SHARE", "Example", "Learned", "Memory", "learn", "recall_of_longest"]

LONGEST_SHARE = 0.2
"""The share of turns whose finding recall counts: StreamRL's tail."""
_MAX_ANSWERS = 32
_HOLD_OUT = 5
_LEAST_HELD_OUT = 5
_MAX_LOG = 20.0

_Prompt = tuple[tuple[str, int], Columns, deque[int]]  # place, columns, newest lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and its newest answers."""

    place: tuple[str, int]
    """Task and turn index."""
    columns: Columns
    """What is known of it before."""
    lengths: tuple[int, ...]
    """Tokens of each answer, at most 32."""

    @property
    def held_out(self) -> bool:
        """Whether it is of those tasks, a fifth, on which the ranker is judged."""
        return hashlib.blake2b(self.place[0].encode()).digest()[0] % _HOLD_OUT == 0

    @property
    def log_lengths(self) -> list[float]:
        """Of each answer; one without a token counts as one of one."""
        return [math.log(max(length, 1)) for length in self.lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What was learned, and how good it is. Never changes."""

    model: LengthModel
    """Knows all that was remembered, by prompt."""
    earlier: Mapping[tuple[str, int], tuple[float, int]]
    """Mean log length and number of remembered answers, by task and turn index."""
    num_turns: int
    """Turns it has learned from."""
    time: datetime
    """When."""
    recall: float
    """Share of the longest fifth of turns that it ranks there, of tasks kept from it; 0: too few
    to tell."""
    median_tokens: float
    """Of the turns it has learned from."""
    p90_tokens: float
    """Their ninth decile."""

    def expected_tokens(self, beginnings: Sequence[Beginning]) -> list[float]:
        """Tokens that each turn will probably sample: half of such turns sample more."""
        if not beginnings:
            return []
        by_prompt = self.model.predict([columns(beginning) for beginning in beginnings])
        return [
            math.exp(min(max(self._with_earlier(beginning, guess), 0.0), _MAX_LOG))
            for beginning, guess in zip(beginnings, by_prompt, strict=True)
        ]

    def _with_earlier(self, beginning: Beginning, guess: float) -> float:
        """Each earlier answer to the same task counts as much as what the prompt tells."""
        mean, number = self.earlier.get(beginning.place, (0.0, 0))
        return (guess + number * mean) / (1 + number)


class Memory:
    """The prompts whose answers came last. Bounded: older ones are forgotten."""

    def __init__(self, max_prompts: int) -> None:
        self._max_prompts = max_prompts
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()

    def add(self, beginning: Beginning, num_tokens: int) -> None:
        """A turn has ended after `num_tokens` sampled tokens."""
        found = columns(beginning)
        name = repr(beginning.place).encode()
        key = hashlib.blake2b(name + found.tobytes(), digest_size=16).digest()
        if key not in self._prompts:
            self._prompts[key] = (beginning.place, found, deque(maxlen=_MAX_ANSWERS))
        self._prompts[key][-1].append(num_tokens)
        self._prompts.move_to_end(key)
        if len(self._prompts) > self._max_prompts:
            self._prompts.popitem(last=False)

    def examples(self) -> list[Example]:
        """All that is remembered, for a thread to learn from."""
        return [
            Example(place=place, columns=found, lengths=tuple(lengths))
            for place, found, lengths in self._prompts.values()
        ]


def learn(examples: Sequence[Example]) -> Learned:
    """Judge on the tasks held out a model that has not seen them; then learn from them too.

    Needs at least one example.
    """
    lengths = np.array([length for example in examples for length in example.lengths])
    return Learned(
        model=_fitted(examples),
        earlier=_earlier(examples),
        num_turns=len(lengths),
        time=datetime.now(UTC),
        recall=_held_out_recall(examples),
        median_tokens=float(np.median(lengths)),
        p90_tokens=float(np.quantile(lengths, 0.9)),
    )


def recall_of_longest(predicted: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    """Share of the longest fifth of `actual` that is in the longest fifth of `predicted`."""
    number = max(1, round(LONGEST_SHARE * len(actual)))
    best, true = (set(np.argsort(-a, kind="stable")[:number]) for a in (predicted, actual))
    return len(best & true) / number


def _fitted(examples: Sequence[Example]) -> LengthModel:
    return LengthModel.fit(
        [example.columns for example in examples],
        np.array([fmean(example.log_lengths) for example in examples]),
        np.array([float(len(example.lengths)) for example in examples]),
    )


def _earlier(examples: Sequence[Example]) -> dict[tuple[str, int], tuple[float, int]]:
    logs: dict[tuple[str, int], list[float]] = {}
    for example in examples:
        logs.setdefault(example.place, []).extend(example.log_lengths)
    return {place: (fmean(found), len(found)) for place, found in logs.items()}


def _held_out_recall(examples: Sequence[Example]) -> float:
    held_out = [example for example in examples if example.held_out]
    seen = [example for example in examples if not example.held_out]
    if len(held_out) < _LEAST_HELD_OUT or not seen:
        return 0.0
    log_lengths = _fitted(seen).predict([example.columns for example in held_out])
    counts = [len(example.lengths) for example in held_out]
    actual = np.array([float(length) for example in held_out for length in example.lengths])
    return recall_of_longest(np.repeat(log_lengths, counts), actual)
