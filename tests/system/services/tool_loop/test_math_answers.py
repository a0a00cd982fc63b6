"""The boxes of an answer, and what math-verify alone would call equal."""

from __future__ import annotations

import subprocess
import sys


def test_math_verify_alone_would_call_small_numbers_equal() -> None:
    """The control: its own rule is why there is another one in equality.py."""
    program = (
        "from math_verify import parse, verify\n"
        r"print(verify(*(parse(r'$\frac{1}{2^{%d}}$' % power) for power in (99, 98))))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert said.stdout == "True\n"
