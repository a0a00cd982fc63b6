"""Takes credentials out of what is given to others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_REMOVED = "[removed]"
_HIDDEN = "█"
_SHORTEST = 8
_FORMS = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"\bsk-[A-Za-z0-9_-]{16,}",
    r"\bgh[pousr]_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\bhf_[A-Za-z0-9]{20,}",
    r"\bxox[a-z]-[A-Za-z0-9-]{10,}",
    r"\bA(?:KIA|SIA)[0-9A-Z]{16}\b",
    r"\bAIza[A-Za-z0-9_-]{30,}",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+",
    r"(?i:\bbearer\s+)[A-Za-z0-9._~+/=-]{16,}",
    r"(?<=://)[^\s/:@]+:[^\s/@]+(?=@)",
    r"(?i:\b(?:password|passwd|secret|api[_-]?key|access[_-]?key|auth[_-]?token|credential)s?"
    r"[\"']?\s*[:=]\s*[\"']?)[^\s\"',;]{6,}",
)
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_FILES = ("credential_secret", "console_token", "hosts/agent_token")


def known_secrets(folder: Path | None) -> set[str]:
    """Secrets of the run in `folder`, and those among this process's variables."""
    found = {value for name, value in os.environ.items() if _NAMES.search(name)}
    for name in _FILES if folder is not None else ():
        file = Path(folder or "") / name
        if file.is_file():
            found.add(file.read_text(encoding="utf-8", errors="replace").strip())
    if folder is not None and (folder / "redis.conf").is_file():
        found.update((folder / "redis.conf").read_text(encoding="utf-8").split()[1:2])
    return {value for value in found if len(value) >= _SHORTEST}


class Redaction:
    """Replaces known secrets, and what has the form of a credential."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        forms = [re.escape(value) for value in sorted(known, key=len, reverse=True)]
        self._pattern = re.compile("|".join((*forms, *_FORMS)), re.DOTALL)
        self.num_removed = 0
        """Places where something was removed."""

    def values(self, values: Any) -> Any:
        """JSON values without them, in texts and in names."""
        if isinstance(values, str):
            text, number = self._pattern.subn(_REMOVED, values)
            self.num_removed += number
            return text
        if isinstance(values, Mapping):
            return {self.values(name): self.values(value) for name, value in values.items()}
        return [self.values(each) for each in values] if isinstance(values, list) else values

    def window(self, window: Mapping[str, Any]) -> dict[str, Any]:
        """Tokens whose texts, joined, have none; their ids would tell them, and are -1."""
        texts, ids = list(window["texts"]), list(window["ids"])
        for match in self._pattern.finditer("".join(texts)):
            self.num_removed += 1
            for index in _overlapping(window["texts"], match.start(), match.end()):
                texts[index], ids[index] = _HIDDEN, -1
        return {**window, "texts": texts, "ids": ids}


def _overlapping(texts: Iterable[str], start: int, end: int) -> list[int]:
    found, at = list[int](), 0
    for index, text in enumerate(texts):
        if at < end and at + len(text) > start:
            found.append(index)
        at += len(text)
    return found
