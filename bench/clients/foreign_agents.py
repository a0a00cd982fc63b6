"""The clients of examples/clients as programs: what to run, and what each says at its end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.provenance import ROOT

__all__ = ["COMMANDS", "Said", "check_programs", "read_summary"]

CLIENTS = ROOT / "examples" / "clients"
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "node": ("node", str(CLIENTS / "node" / "agent.js")),
    "go": (str(CLIENTS / "go" / "agent"),),
    "cpp": (str(CLIENTS / "cpp" / "agent"),),
}
"""The program of each client; the gateway's address and the run's name follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The summary that a client prints as its last line."""

    rollouts: int
    """Rollouts leased."""
    failed: int
    """Of those, finished with a failure instead of a reward."""
    resumed: int
    """Streams of turns that were resumed at an offset."""
    reason: str
    """Reason of the call that was refused on purpose."""
    fields: tuple[str, ...]
    """Its fields at fault."""
    text: str
    """Its message."""

    def is_right(self) -> bool:
        """Whether it did everything that a client has to do."""
        is_decoded = self.reason == "INVALID_FIELD" and "sampling.temperature" in self.fields
        return is_decoded and "temperature" in self.text and min(self.rollouts, self.resumed) >= 1


def check_programs() -> None:
    """Raise `FileNotFoundError` for a client that was not built."""
    for name, command in COMMANDS.items():
        missing = [
            part for part in command if shutil.which(part) is None and not Path(part).exists()
        ]
        if missing:
            raise FileNotFoundError(
                f"{missing[0]} is missing for the {name} client: make test-clients"
            )


def read_summary(log: Path) -> Said:
    """What a client that has ended printed last.

    Raises:
        ValueError: its last line is no summary.
    """
    last = (log.read_text(encoding="utf-8").splitlines() or [""])[-1]
    try:
        found = json.loads(last)
        refusal = found["refusal"]
        return Said(
            rollouts=found["rollouts"],
            failed=found["failed"],
            resumed=found["resumed"],
            reason=refusal["reason"],
            fields=tuple(refusal["fields"]),
            text=refusal["text"],
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the last line of {log} is no summary ({error!r}): {last[:200]}"
        ) from error
