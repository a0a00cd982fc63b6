"""The common prefix of token sequences; without torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def shared_tokens(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(one), len(other))
    differ = np.nonzero(one[:length] != other[:length])[0]
    return int(differ[0]) if len(differ) else length
