"""What an environment says to the policy, with or without tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from seamflow.environment import Step

_ONE_CALL = "Not done: make one call at a time."


class UnreadableAction(Exception):  # noqa: N818 -- names the condition
    """Raised for an answer of the policy that is no action; the text says why, for the policy."""


class UnreadableAnswers:
    """Counts the answers of an episode that are no action; the last one allowed ends it."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"max_unreadable is {most}: must be at least 1")
        self._most = most
        self._number = 0

    def explain(self, message: Mapping[str, Any], why: str) -> Step:
        """Tell the policy why, or end the episode with a policy failure."""
        self._number += 1
        if self._number < self._most:
            return Step(messages=replies(message, why))
        return Step(done=True, policy_failure=f"{self._number} answers were no action: {why}")


def replies(message: Mapping[str, Any], text: str) -> list[dict[str, Any]]:
    """`text` as the answer to the first tool call, or else as a user message."""
    calls = message.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": text}]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": _ONE_CALL if i else text}
        for i, call in enumerate(calls)
    ]


def tool_arguments(message: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Arguments of the first tool call, which must be of the tool `name`; None: no tool is called.

    Raises:
        UnreadableAction: another tool is called, or the arguments are no JSON object.
    """
    calls = message.get("tool_calls") or []
    if not calls:
        return None
    function = calls[0]["function"]
    if function["name"] != name:
        raise UnreadableAction(f"There is no tool {function['name']!r}: call {name!r}.")
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise UnreadableAction(f"The arguments of the call are no JSON: {error}.") from error
    if not isinstance(arguments, dict):
        raise UnreadableAction("The arguments of the call are no JSON object.")
    return arguments
