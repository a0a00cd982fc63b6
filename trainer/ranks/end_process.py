"""Ending a process that was a rank of a process group."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End now with this exit code, when everything is closed.

    The interpreter's own end would destroy the objects of torch.distributed beside their threads;
    now and then it aborted there ("terminate called without an active exception"), and a process
    that had done its work looked like one that crashed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
