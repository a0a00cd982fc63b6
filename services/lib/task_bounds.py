"""What the trajectory manager takes as a name and as a payload.

Whoever makes tasks applies it before, so that no run starts on a task that is refused.
"""

from __future__ import annotations

import re

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
