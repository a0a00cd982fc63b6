"""The clients of examples/clients as programs: what to run, and what each says at its end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.provenance import ROOT

CLIENTS = ROOT / "examples" / "clients"
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "node": ("node", str(CLIENTS / "node" / "agent.js")),
    "go": (str(CLIENTS / "go" / "agent"),),
    "cpp": (str(CLIENTS / "cpp" / "agent"),),
}
"""The program of each client; the gateway's address and the run's name follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a client prints as its last line."""

    resumed: int
    """Streams of turns that it resumed at an offset; one of them it broke on purpose."""
    reason: str
    """Reason of the call that was refused on purpose."""
    fields: tuple[str, ...]
    """Its fields at fault."""
    text: str
    """Its message."""

    def is_right(self) -> bool:
        """Whether it resumed a stream and decoded the refusal."""
        is_decoded = self.reason == "INVALID_FIELD" and len(self.fields) > 0
        return is_decoded and all(name in self.text for name in self.fields) and self.resumed > 0


def check_programs() -> None:
    """Raise `FileNotFoundError` for a client that was not built."""
    for name, command in COMMANDS.items():
        for part in command:
            if shutil.which(part) is None and not Path(part).exists():
                raise FileNotFoundError(f"{part}: missing for the {name} client: make test-clients")


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
            resumed=found["resumed"],
            reason=refusal["reason"],
            fields=tuple(refusal["fields"]),
            text=refusal["text"],
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{log} ends with no summary ({error!r}): {last[:200]}") from error
