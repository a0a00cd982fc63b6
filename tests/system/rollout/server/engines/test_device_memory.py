"""What is in use on a server's devices, by nvidia-smi."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout.server.engines.sglang.server_weights import used_bytes

MEGABYTE = 1 << 20


def play(folder: Path, output: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program of that name on the path; gives the file of its arguments."""
    told = folder / "arguments"
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {told}\nprintf '{output}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return told


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("1200\\n3\\n", 1203 * MEGABYTE),
        ("[N/A]\\n", None),
        ("No devices were found\\n", None),
        ("", None),
    ],
)
async def test_used_bytes_are_those_of_the_visible_devices(
    output: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those of this process; what is no number is no measurement."""
    told = play(tmp_path, output, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert await used_bytes() == expected
    assert told.read_text().split()[-1] == "--id=2,5"


async def test_without_nvidia_smi_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as on a machine without GPUs."""
    monkeypatch.setenv("PATH", "")
    assert await used_bytes() is None
