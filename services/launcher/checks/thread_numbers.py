"""Threads of numerical libraries, divided among the processes of this machine that compute."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_COMPUTING = ("trainer", "rollout_server", "scoring")
"""Beginnings of the names of processes that compute; others wait for them."""


def divided_threads(
    environment: Mapping[str, str], processes: Collection[str], cores: int
) -> tuple[dict[str, str], list[str]]:
    """Variables that ask for more threads than a process has cores, with fewer; a line for each.

    Args:
        environment: variables of the user.
        processes: names of those of the run.
        cores: of this machine.
    """
    number = sum(name.startswith(_COMPUTING) for name in processes) or 1
    most = max(1, cores // number)
    found, lines = {}, []
    for name in _VARIABLES:
        # OMP_NUM_THREADS may be a list, by level of nesting.
        first = environment.get(name, "").partition(",")[0].strip()
        if first.isdecimal() and int(first) > most:
            found[name] = str(most)
            lines.append(
                f"{name} is {first}, and {number} processes compute on {cores} cores: each gets "
                f"{most}; more would slow all of them down"
            )
    return found, lines


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
