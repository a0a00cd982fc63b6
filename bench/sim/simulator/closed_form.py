"""The makespan of one generation by a formula, to check the simulator by something else."""

from __future__ import annotations

from collections.abc import Sequence

from bench.sim.costs import EngineCosts


def generation_seconds(lengths: Sequence[int], prompt_tokens: int, costs: EngineCosts) -> float:
    """Seconds until a node has sampled sequences of `lengths` that all begin at the same time.

    All have a slot. Between two ends the number of sequences c is constant, so with the lengths in
    ascending order l_1 <= ... <= l_n, l_0 = 0, it is

        n p / f + sum over i of (l_i - l_(i-1)) (T(c_i) + k c_i (p + (l_i + l_(i-1)) / 2)),

    c_i = n - i + 1, with p prompt tokens each, f prefilled tokens per second, T(c) seconds of a
    decode step, and k seconds for each cached token read.
    """
    seconds = len(lengths) * prompt_tokens / costs.prefill_tokens_per_second
    before = 0
    for ended, length in enumerate(sorted(lengths)):
        running = len(lengths) - ended
        cached = running * (prompt_tokens + (length + before) / 2)
        seconds += (length - before) * costs.step_seconds(running, cached)
        before = length
    return seconds
