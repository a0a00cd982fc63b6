"""Metrics of a step as short lines, with marks at values that are never right."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping

_WIDTH, _INDENT = 96, " " * 9
_KEPT_TOGETHER = "\N{NO-BREAK SPACE}"
_BAD_AT_ZERO = ("grad_norm", "learning_rate", "num_samples")


def metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Names and numbers, a few on each line; a `!` marks those that say that nothing is learned.

    >>> metric_lines({"loss": 0.125, "grad_norm": 0.0})
    ['         loss 0.125, grad_norm 0 !']
    """
    lines = textwrap.wrap(
        ", ".join(_shown(metrics)),
        _WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT_TOGETHER, " ") for line in lines]


def _shown(metrics: Mapping[str, float]) -> Iterator[str]:
    for name, value in metrics.items():
        bad = not math.isfinite(value) or (value == 0 and name in _BAD_AT_ZERO)
        yield _KEPT_TOGETHER.join((name, f"{value:.4g}", *(["!"] if bad else [])))
