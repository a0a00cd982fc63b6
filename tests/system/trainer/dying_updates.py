"""`python -m trainer` that kills itself in the middle of a step of several updates."""

from __future__ import annotations

import os
import signal
import sys

from trainer.cli import main
from trainer.policy.policy import Policy

_LAST = 15
"""Updates that happen: of six for each step, the third of the third step."""


def lethal(self: Policy, step: int) -> dict[str, float]:
    """Optimize, or die."""
    global _LAST
    if _LAST == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    _LAST -= 1
    return _OPTIMIZE(self, step)


if __name__ == "__main__":
    _OPTIMIZE = Policy.optimize
    Policy.optimize = lethal  # type: ignore[method-assign]
    sys.argv = [sys.argv[0], *[each for each in sys.argv[1:] if each not in ("-m", "trainer")]]
    main()
