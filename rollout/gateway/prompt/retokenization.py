"""Re-tokenisation drift: the caller's prompt has other ids than were sampled, for the same text.

Encoding is not the inverse of decoding: an agent that keeps text and encodes it again gets other
ids, and what follows would be trained on a history that the policy never had. A prompt that leaves
the record with another text is no drift but a rewritten history.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway.prompt.chat_template import ChatTemplate

__all__ = ["find_drift"]

_MAX_CHARACTERS = 200
# Decoded before the difference: a token's text may depend on its neighbour, and a character may
# begin in what both share.
_CONTEXT = 16
# Ids of the prompt that are compared: the caller's pieces may be single bytes.
_MAX_IDS = 1024
_CUT = "\N{REPLACEMENT CHARACTER}"
"""What decoding gives for a character whose last bytes are beyond the end."""


def find_drift(
    template: ChatTemplate, prompt_ids: Sequence[int], divergence: store_pb.Divergence
) -> trajectory_pb2.Drift | None:
    """The drift of a prompt that leaves the record at `divergence`; None if its text does too."""
    start = divergence.position
    context = list(prompt_ids[max(start - _CONTEXT, 0) : start])
    recorded = template.text([*context, *divergence.token_ids]).rstrip(_CUT)
    given = template.text([*context, *prompt_ids[start : start + _MAX_IDS]]).rstrip(_CUT)
    shared = _num_shared(template.text(context).rstrip(_CUT), recorded, given)
    recorded, given = recorded[shared:], given[shared:]
    same = recorded.startswith(given) or given.startswith(recorded)
    if not (recorded and given and same):
        return None
    return trajectory_pb2.Drift(
        position=start,
        recorded_text=recorded[:_MAX_CHARACTERS],
        retokenized_text=given[:_MAX_CHARACTERS],
    )


def _num_shared(*texts: str) -> int:
    """Characters that all texts begin with."""
    columns = zip(*texts, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
