"""What a task, a turn and a sample may hold.

Names and payloads of tasks are checked by whoever makes tasks too, so that no run starts on one
that the trajectory manager refuses. The numbers of samples are such that training in float32
survives them; greater ones are mistakes. The gateway and the trajectory manager refuse these where
they enter, the trainer rejects the rest.
"""

from __future__ import annotations

import re

from seamflow.common.v1.tokens_pb2 import SamplingParams

from services.chassis.errors import invalid_argument
from services.chassis.rpc.fields import not_negative, positive

MIN_TEMPERATURE = 0.01
"""Of sampling: below it, log-probs differ between engine and trainer by rounding alone."""
MAX_REWARD = 1e12
"""Greatest magnitude of a reward, and of the sum of a rollout's rewards of one name: its square,
summed over a batch, is finite in float32."""
MIN_LOGPROB = -80.0
"""Least log-prob of a sampled token: none is ever drawn with probability e^-80, and beyond e^88 an
importance ratio is infinite in float32."""
MAX_LOGPROB = 0.01
"""Greatest log-prob, above 0 by no more than rounding in bfloat16."""


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,199}")
NAME_CHARACTERS = "A-Z a-z 0-9 . _ ~ : @ + = / - that begin with a letter or digit"
NAME_RULE = f"1 to 200 of {NAME_CHARACTERS}"
MAX_PAYLOAD_BYTES = 1 << 20
"""Of a JSON object in UTF-8."""
MAX_ROW_NAME = 150
"""Characters of a row's name, to which epoch or evaluation, sample and attempt are added."""


def is_name(value: str) -> bool:
    """Whether `NAME_RULE` allows the value, which is safe in a Redis key then."""
    return _NAME.fullmatch(value) is not None


_MAX_STOP_IDS = 64
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 256


def check_sampling(field: str, params: SamplingParams) -> None:
    """Refuse what the contract does not allow; what is absent has its default.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    not_negative(f"{field}.temperature", params.temperature)
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        raise invalid_argument(f"{field}.top_p", params.top_p, "must be in (0, 1]")
    if params.top_k < 0:
        raise invalid_argument(f"{field}.top_k", params.top_k, "must be at least 0; 0 is off")
    if not 0 <= params.min_p <= 1:
        raise invalid_argument(f"{field}.min_p", params.min_p, "must be in [0, 1]")
    if params.HasField("max_new_tokens"):
        positive(f"{field}.max_new_tokens", params.max_new_tokens)
    for name, most in (("stop_token_ids", _MAX_STOP_IDS), ("stop", _MAX_STOPS)):
        if (number := len(getattr(params, name))) > most:
            raise invalid_argument(f"{field}.{name}", f"{number} entries", f"give at most {most}")
    for i, string in enumerate(params.stop):
        if not 1 <= len(string) <= _MAX_STOP_CHARACTERS:
            cure = f"must have 1 to {_MAX_STOP_CHARACTERS} characters"
            raise invalid_argument(f"{field}.stop[{i}]", string[:40], cure)
