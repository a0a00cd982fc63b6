"""GPUs of this machine: what nvidia-smi says of them, and which of them a process sees."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

MEGABYTE = 1 << 20
"""Bytes of the unit in which it gives memory."""


async def gpu_fields(fields: str, gpus: str | None) -> list[list[str]]:
    """Fields of each GPU; empty where nvidia-smi is missing, or does not know them.

    Args:
        fields: as for its option --query-gpu, such as "name,memory.total".
        gpus: their numbers, separated by commas; None: all.
    """
    chosen = () if gpus is None else (f"--id={gpus}",)
    command = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", *chosen)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return []
    output = (await process.communicate())[0].decode(errors="replace")
    if process.returncode:
        return []
    return [[part.strip() for part in line.split(",")] for line in output.splitlines() if line]


def seeing_gpus(gpus: Sequence[int]) -> dict[str, str]:
    """Variables of a process that sees just these GPUs, which may be none.

    Args:
        gpus: numbers, as nvidia-smi counts them.
    """
    # Or else CUDA counts the fastest first, and nvidia-smi by their places on the bus.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
