"""How large a value of the user's is, before it is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

MAX_OBSERVATION_BYTES = 4 << 20
"""Messages and info of one answer: what a prompt may have at the gateway (`max_prompt_bytes`)."""

_NODE_BYTES = 8


def check_size(what: str, limit: int, *values: object) -> None:
    """Refuse values that together are larger than `limit`, whatever they hold.

    Looks no further than the limit, and not by recursion: at 50 MB of text as at a dict that
    holds itself.

    Raises:
        ValueError: names `what`, such as "step returned messages", the limit and the cure.
    """
    size, left = 0, list[Any](values)
    while left:
        value = left.pop()
        size += _own_size(value)
        # Parts are counted before they are listed: there may be millions.
        if size + _NODE_BYTES * (len(left) + _num_parts(value)) > limit:
            raise ValueError(
                f"{what} of more than {limit} bytes: return less, such as a part that says what "
                "was left out; a larger one needs max_observation_bytes of the environment server, "
                "and max_request_bytes, max_prompt_bytes and max_message_bytes of [rollout_gateway]"
            )
        if isinstance(value, Mapping):
            left.extend(value.keys())
            left.extend(value.values())
        elif _num_parts(value):
            left.extend(value)


def _num_parts(value: object) -> int:
    if isinstance(value, Mapping):
        return 2 * len(value)
    is_flat = isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence | Set)
    return 0 if is_flat else len(value)  # type: ignore[arg-type]


def _own_size(value: object) -> int:
    if isinstance(value, str | bytes | bytearray):
        return _NODE_BYTES + len(value)
    return _NODE_BYTES + int(getattr(value, "nbytes", 0))
