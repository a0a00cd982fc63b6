"""Text of agents on a terminal."""

from __future__ import annotations

import sys

import pytest
from seamflow.printable import escaped, escaped_output


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("\x9b31m\r\x07\x7f", "\\x9b31m\\r\\x07\\x7f"),
        ("a\u202eb\u2028", "a\\u202eb\\u2028"),
        ("ü 日本\n\tx", "ü 日本\n\tx"),
    ],
)
def test_what_controls_a_terminal_is_shown(text: str, shown: str) -> None:
    """Other text stays as it is."""
    assert escaped(text) == shown


def test_what_is_printed_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """On both streams; outside of the context it is not (negative control)."""
    with escaped_output():
        print("a\x1bb")
        sys.stderr.write("c\x1bd")
    print("e\x1bf")
    assert capsys.readouterr() == ("a\\x1bb\ne\x1bf\n", "c\\x1bd")
