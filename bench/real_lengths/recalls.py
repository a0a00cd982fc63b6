"""Recall of the longest fifth by cross-validation: a prompt is predicted by a fit without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.real_lengths.generations import Generated
from services.ranker.features import TurnStart
from services.ranker.learner import recall_of_longest
from services.ranker.regression import Regression

_FOLDS = 5
_SHUFFLES = 1000

_Floats = NDArray[np.float64]


def predicted_tokens(
    regression: Regression, answers: Sequence[Generated], seed: int, folds: int = _FOLDS
) -> _Floats:
    """Tokens of each answer, expected by a fit to the prompts of the other folds, shape [n]."""
    prompts = [
        regression.read(TurnStart(task_id=str(i), token_ids=answer.token_ids, turn_index=0))
        for i, answer in enumerate(answers)
    ]
    logs = np.log(_lengths(answers)).mean(1)
    num_answers = np.array([float(len(answer.lengths)) for answer in answers])
    fold = _folds_of(answers, seed, folds)
    expected = np.empty(len(answers))
    for held_out in range(folds):
        seen, new = np.flatnonzero(fold != held_out), np.flatnonzero(fold == held_out)
        model = regression.fit([prompts[i] for i in seen], logs[seen], num_answers[seen])
        expected[new] = model.predict([prompts[i] for i in new])
    return np.exp(expected)


def _folds_of(answers: Sequence[Generated], seed: int, folds: int) -> NDArray[np.int64]:
    """A fold for each answer; those to one prompt are in one fold."""
    found = {tuple(answer.token_ids): 0 for answer in answers}
    folds_of = np.random.default_rng(seed).permutation(len(found)) % folds
    fold = dict(zip(found, folds_of.tolist(), strict=True))
    return np.array([fold[tuple(answer.token_ids)] for answer in answers])


def recall(expected: _Floats, answers: Sequence[Generated]) -> float:
    """Of all prompts together: the mean over the first answers, the second ones and so on."""
    return float(np.mean([recall_of_longest(expected, each) for each in _lengths(answers).T]))


def recall_by_other_answers(answers: Sequence[Generated]) -> float:
    """By the mean log length of the other answers to the same prompt, as `recall` counts.

    An answer's length is drawn: no ranker that sees the prompt alone comes close to 1.
    """
    logs = np.log(_lengths(answers))
    others = (logs.sum(1, keepdims=True) - logs) / (logs.shape[1] - 1)
    pairs = zip(others.T, logs.T, strict=True)
    return float(np.mean([recall_of_longest(known, one) for known, one in pairs]))


def chance(answers: Sequence[Generated]) -> float:
    """Mean recall of random rankings; more than a fifth where more reach the limit of tokens."""
    random, lengths = np.random.default_rng(0), _lengths(answers)[:, 0]
    found = [recall_of_longest(random.random(len(lengths)), lengths) for _ in range(_SHUFFLES)]
    return float(np.mean(found))


def _lengths(answers: Sequence[Generated]) -> _Floats:
    """Tokens of m answers to each of n prompts, shape [n, m]."""
    return np.array([answer.lengths for answer in answers], dtype=np.float64)
