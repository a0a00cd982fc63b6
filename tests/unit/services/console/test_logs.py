"""Logs of a run that a page may read."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.console.api_error import ApiError
from services.console.views.logs import last_lines, logs


def test_the_end_of_a_log_has_whole_lines(tmp_path: Path) -> None:
    """At most 256 KiB, also of bytes that are no text."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_bytes(b"x" * 300_000 + b"\nlast \xff line\n")
    assert [(log["name"], log["bytes"]) for log in logs(tmp_path)] == [("trainer", 300_013)]
    assert last_lines(tmp_path, "trainer") == "last \N{REPLACEMENT CHARACTER} line\n"


@pytest.mark.parametrize("name", ["../console_token", "linked", "none", ""])
def test_nothing_else_is_read(tmp_path: Path, name: str) -> None:
    """No path, and no link out of the folder."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "console_token.log").write_text("secret")
    (tmp_path / "logs" / "linked.log").symlink_to(tmp_path / "console_token.log")
    with pytest.raises(ApiError, match="no log"):
        last_lines(tmp_path, name)
    assert logs(tmp_path) == logs(None) == []
