"""JSON objects of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_object"]


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file of the folder; empty without the file.

    Raises:
        ValueError: it cannot be read, or is no object; names the folder and the file.
    """
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"model {folder}: {name} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"model {folder}: {name} is not a JSON object")  # noqa: TRY004
    return values
