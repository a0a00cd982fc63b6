"""Environments and their tools: actions, texts, seeds, results, and code that exits."""

from tests.suites.field.inputs.environments import (
    action_spaces,
    broken_texts,
    episode_seeds,
    tool_results,
    user_code,
)

__all__ = ["KINDS"]

KINDS = (
    *action_spaces.KINDS,
    *broken_texts.KINDS,
    *episode_seeds.KINDS,
    *tool_results.KINDS,
    *user_code.KINDS,
)
