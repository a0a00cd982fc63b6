"""Python that a page shows, run by a test as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def run_page(page: str, heading: str) -> dict[str, Any]:
    """The names that the code block below `heading` of docs/`page` defines."""
    text = (Path("docs") / page).read_text()
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, page, "exec"), names)
    return names
