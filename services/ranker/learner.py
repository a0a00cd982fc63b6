"""The ranker's memory of a run, and the model fitted to it."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from services.ranker.features import TurnStart
from services.ranker.regression import HASHED, LengthModel, Prompt, Regression

LONGEST_SHARE = 0.2
"""Share of the longest turns for which recall is measured: StreamRL's tail."""
_MAX_ANSWERS = 32
_HOLD_OUT = 5
_LEAST_HELD_OUT = 5
_MAX_LOG = 20.0

_Remembered = tuple[tuple[str, int], Prompt, deque[int]]  # place, prompt, newest lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and its newest answers."""

    place: tuple[str, int]
    """Task and turn index."""
    prompt: Prompt
    lengths: tuple[int, ...]
    """Tokens of each answer, at most 32."""

    @property
    def held_out(self) -> bool:
        """Whether its task is one of the fifth that the model is validated on."""
        return hashlib.blake2b(self.place[0].encode()).digest()[0] % _HOLD_OUT == 0

    @property
    def log_lengths(self) -> list[float]:
        """Natural logarithm of each length, at least 0."""
        return [math.log(max(length, 1)) for length in self.lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """An immutable fitted model with its validation."""

    regression: Regression
    """What it was fitted by."""
    model: LengthModel
    """Predicts log lengths from prompts."""
    earlier: Mapping[tuple[str, int], tuple[float, int]]
    """Mean log length and number of remembered answers, by task and turn index."""
    num_turns: int
    """Turns it was fitted to."""
    recall: float
    """Share of the longest fifth of held-out turns that it ranks in the longest fifth; 0: too few
    turns."""
    median_tokens: float
    p90_tokens: float

    def expected_tokens(self, starts: Sequence[TurnStart]) -> list[float]:
        """Predicted median number of sampled tokens of each turn."""
        if not starts:
            return []
        by_prompt = self.model.predict([self.regression.read(start) for start in starts])
        return [
            math.exp(min(max(self._with_earlier(start, guess), 0.0), _MAX_LOG))
            for start, guess in zip(starts, by_prompt, strict=True)
        ]

    def _with_earlier(self, start: TurnStart, guess: float) -> float:
        """Mean of the prediction and of earlier answers to the same task, with equal weights."""
        mean, number = self.earlier.get(start.place, (0.0, 0))
        return (guess + number * mean) / (1 + number)


class Memory:
    """The prompts with the latest answers, at most `max_prompts`."""

    def __init__(self, max_prompts: int, regression: Regression = HASHED) -> None:
        self._max_prompts = max_prompts
        self._regression = regression
        self._prompts: OrderedDict[bytes, _Remembered] = OrderedDict()

    def add(self, start: TurnStart, num_tokens: int) -> None:
        """Add a turn that ended after `num_tokens` sampled tokens."""
        found = self._regression.read(start)
        name = repr(start.place).encode()
        key = hashlib.blake2b(name + found.tobytes(), digest_size=16).digest()
        if key not in self._prompts:
            self._prompts[key] = (start.place, found, deque(maxlen=_MAX_ANSWERS))
        self._prompts[key][-1].append(num_tokens)
        self._prompts.move_to_end(key)
        if len(self._prompts) > self._max_prompts:
            self._prompts.popitem(last=False)

    def examples(self) -> list[Example]:
        """A copy of all prompts, for a fit in another thread."""
        return [
            Example(place=place, prompt=found, lengths=tuple(lengths))
            for place, found, lengths in self._prompts.values()
        ]


def learn(examples: Sequence[Example], regression: Regression = HASHED) -> Learned:
    """Validate a model on held-out tasks, then fit one to all tasks.

    Needs at least one example.
    """
    lengths = np.array([length for example in examples for length in example.lengths])
    return Learned(
        regression=regression,
        model=_fitted(examples, regression),
        earlier=_earlier(examples),
        num_turns=len(lengths),
        recall=_held_out_recall(examples, regression),
        median_tokens=float(np.median(lengths)),
        p90_tokens=float(np.quantile(lengths, 0.9)),
    )


def recall_of_longest(predicted: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    """Share of the longest fifth of `actual` that is in the longest fifth of `predicted`.

    Turns as long as the shortest of the longest fifth, such as all that end at a limit of tokens,
    are equally right: as many of them count as have room in the fifth.
    """
    number = max(1, round(LONGEST_SHARE * len(actual)))
    found = actual[np.argsort(-predicted, kind="stable")[:number]]
    shortest = np.sort(actual)[-number]
    num_longer, room = (found > shortest).sum(), number - (actual > shortest).sum()
    return float(num_longer + min((found == shortest).sum(), room)) / number


def _fitted(examples: Sequence[Example], regression: Regression) -> LengthModel:
    return regression.fit(
        [example.prompt for example in examples],
        np.array([fmean(example.log_lengths) for example in examples]),
        np.array([float(len(example.lengths)) for example in examples]),
    )


def _earlier(examples: Sequence[Example]) -> dict[tuple[str, int], tuple[float, int]]:
    logs: dict[tuple[str, int], list[float]] = {}
    for example in examples:
        logs.setdefault(example.place, []).extend(example.log_lengths)
    return {place: (fmean(found), len(found)) for place, found in logs.items()}


def _held_out_recall(examples: Sequence[Example], regression: Regression) -> float:
    held_out = [example for example in examples if example.held_out]
    seen = [example for example in examples if not example.held_out]
    if len(held_out) < _LEAST_HELD_OUT or not seen:
        return 0.0
    model = _fitted(seen, regression)
    log_lengths = model.predict([example.prompt for example in held_out])
    counts = [len(example.lengths) for example in held_out]
    actual = np.array([float(length) for example in held_out for length in example.lengths])
    return recall_of_longest(np.repeat(log_lengths, counts), actual)
