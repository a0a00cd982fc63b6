"""What a gateway's process loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LOADS_A_TOKENIZER = """
from transformers import AutoTokenizer
import sys
print(sys.modules.get("torch") is not None)
import torch  # as a plug-in may
"""


@pytest.mark.parametrize(
    ("first", "loads_torch"), [("import rollout.gateway.__main__", False), ("pass", True)]
)
def test_a_gateway_does_not_load_torch(first: str, loads_torch: bool) -> None:
    """Control: without the gateway's first lines a tokenizer brings it."""
    code = f"import sys\nsys.argv = ['', '--help']\ntry:\n    {first}\nexcept SystemExit:\n    pass"
    done = subprocess.run(
        [sys.executable, "-c", code + _LOADS_A_TOKENIZER],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == str(loads_torch)
    assert "PyTorch was not found" not in done.stderr
