"""Retokenization drift: the prompt has other ids than were sampled, for the same text.

Encoding is not the inverse of decoding: an agent that keeps text and encodes it again may get other
ids, and later turns would be trained on a history that the policy never had. A prompt whose text
differs from the record is not drift but a rewritten history.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway.prompt.chat_template import ChatTemplate
from services.lib.token_bytes import unpack_ids

_MAX_CHARACTERS = 200
# Tokens decoded before the difference: a token's text may depend on its neighbour, and a character
# may begin in the shared prefix.
_CONTEXT = 16
# Ids of the prompt that are compared: the caller's pieces may be single bytes.
_MAX_IDS = 1024
_CUT = "\N{REPLACEMENT CHARACTER}"
"""Decoding gives this for a character whose last bytes are missing."""


def find_drift(
    template: ChatTemplate, prompt_ids: Sequence[int], divergence: store_pb.Divergence
) -> tokens_pb2.Drift | None:
    """The drift of a prompt whose ids differ from `divergence` on; None if its text differs too."""
    start = divergence.position
    context = list(prompt_ids[max(start - _CONTEXT, 0) : start])
    recorded_ids = unpack_ids(divergence.token_ids)
    recorded = template.text([*context, *recorded_ids]).rstrip(_CUT)
    given = template.text([*context, *prompt_ids[start : start + _MAX_IDS]]).rstrip(_CUT)
    shared = _num_shared(template.text(context).rstrip(_CUT), recorded, given)
    recorded, given = recorded[shared:], given[shared:]
    same = recorded.startswith(given) or given.startswith(recorded)
    if not (recorded and given and same):
        return None
    return tokens_pb2.Drift(
        position=start,
        recorded_text=recorded[:_MAX_CHARACTERS],
        retokenized_text=given[:_MAX_CHARACTERS],
    )


def _num_shared(*texts: str) -> int:
    """Characters that all texts begin with."""
    columns = zip(*texts, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
