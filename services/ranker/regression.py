"""How log lengths are predicted from prompts, and the hashed way: two stacked ridge regressions.

A linear one selects and scales the relevant columns. A kernel one of degree 2 on these adds their
interactions (a hard word makes a proof longer than a greeting). Both have closed forms: no learning
rate, no seed, deterministic results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from services.ranker.features import Columns, TurnStart, columns

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Prompt = NDArray[np.integer[Any]]
"""What a regression reads of a turn, shape [n]; turns of equal prompts share their lengths."""

_Floats = NDArray[np.float64]
_Rows = NDArray[np.float32]

_LINEAR_PENALTY = 10.0
_NOISE = 1.0
"""Penalty of the kernel regression for a prompt with one answer; less the more it has."""
_MAX_COLUMNS = 2048


class LengthModel(Protocol):
    """An immutable fitted model."""

    def predict(self, prompts: Sequence[Prompt]) -> _Floats:
        """Expected log lengths of m prompts, shape [m]."""
        ...


class Regression(Protocol):
    """A kind of ranker."""

    def read(self, start: TurnStart) -> Prompt: ...

    def fit(
        self, prompts: Sequence[Prompt], log_lengths: _Floats, num_answers: _Floats
    ) -> LengthModel:
        """Fit to n prompts, their mean log length and the number of answers it is the mean of."""
        ...


class HashedModel:
    """Two fitted ridge regressions."""

    def __init__(
        self, kept: Prompt, weights: _Floats, rows: _Rows, dual: _Floats, mean: float
    ) -> None:
        """`kept` and `weights` have shape [k], `rows` [n, k], `dual` [n]."""
        self._kept = kept
        self._weights = weights
        self._rows = rows
        self._dual = dual
        self._mean = mean

    def predict(self, prompts: Sequence[Prompt]) -> _Floats:
        """Expected log lengths of m prompts, shape [m]."""
        rows = _rows(prompts, self._kept, self._weights)
        return self._mean + _kernel(rows, self._rows) @ self._dual


class HashedRegression:
    """Reads the hashed words of a prompt. Deterministic, and needs numpy and scikit-learn alone."""

    def read(self, start: TurnStart) -> Columns:
        return columns(start)

    def fit(
        self, prompts: Sequence[Prompt], log_lengths: _Floats, num_answers: _Floats
    ) -> HashedModel:
        """Takes a few seconds of one core for 4,096 prompts, and never holds the interpreter for
        long.
        """
        from threadpoolctl import threadpool_limits

        mean = float(log_lengths.mean())
        # One core: sampling or training on this machine may need the others.
        with threadpool_limits(1):
            kept, weights = _relevant(prompts, log_lengths)
            rows = _rows(prompts, kept, weights)
            kernel = _kernel(rows, rows)
            kernel.flat[:: len(prompts) + 1] += _NOISE / num_answers
            # sklearn's KernelRidge solves in scipy, which keeps the interpreter for seconds.
            dual = np.linalg.solve(kernel, log_lengths - mean).astype(np.float64)
        return HashedModel(kept, weights, rows, dual, mean)


HASHED = HashedRegression()
"""It has no state."""


def _relevant(prompts: Sequence[Prompt], log_lengths: _Floats) -> tuple[Prompt, _Floats]:
    """The columns with the most explained variance, and the weight of each."""
    from sklearn.linear_model import Ridge

    found, counts = np.unique(np.concatenate(prompts), return_counts=True)
    # A column of a single prompt does not generalize.
    shared = counts > 1 if (counts > 1).any() else counts > 0
    kept, share = found[shared], counts[shared] / len(prompts)
    linear = Ridge(alpha=_LINEAR_PENALTY, solver="sparse_cg")
    weights = np.abs(linear.fit(_ones(prompts, kept), log_lengths).coef_)
    explained = weights**2 * share * (1.0 - share)
    best = np.sort(np.argsort(-explained, kind="stable")[:_MAX_COLUMNS])
    # The mean squared norm of a row becomes 1, so that the kernel knows its scale.
    norm = float(np.sqrt(weights[best] ** 2 @ share[best]))
    return kept[best], weights[best] / norm if norm > 0 else np.ones(len(best))


def _rows(prompts: Sequence[Prompt], kept: Prompt, weights: _Floats) -> _Rows:
    """A row for each prompt, shape [n, k]: the weights of those kept columns that it has."""
    rows: _Rows = _ones(prompts, kept).toarray()
    rows *= weights.astype(np.float32)
    return rows


def _ones(prompts: Sequence[Prompt], kept: Prompt) -> csr_array:
    """A row for each prompt, shape [n, k]: 1 where it has a kept column."""
    from scipy.sparse import csr_array

    flat = np.concatenate(prompts)
    row = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
    at = np.minimum(np.searchsorted(kept, flat), len(kept) - 1)
    known = kept[at] == flat
    ones = np.ones(int(known.sum()), np.float32)
    return csr_array((ones, (row[known], at[known])), shape=(len(prompts), len(kept)))


def _kernel(rows: _Rows, others: _Rows) -> _Floats:
    """(1 + x·y)² for each pair, shape [m, n]."""
    kernel = (rows @ others.T).astype(np.float64)
    kernel += 1.0
    kernel *= kernel
    return kernel
