"""A process that receives chunks uses its memory again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PAGE_FAULTS = """
import resource
from services.lib.weight_files.shard_chunks import CHUNK_BYTES, keep_freed_memory
{prepare}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    chunks = [bytearray(CHUNK_BYTES) for _ in range(8)]
before = faults()
for _ in range(10):
    del chunks
    chunks = [bytearray(CHUNK_BYTES) for _ in range(8)]
print(faults() - before)
"""


def page_faults(prepare: str) -> int:
    """How often the kernel had to find a page for 80 chunks, after some that were freed."""
    command = [sys.executable, "-c", _PAGE_FAULTS.format(prepare=prepare)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc learns")
def test_freed_chunk_memory_is_reused() -> None:
    """Configured, the C library reuses freed pages; by default it returns them."""
    assert page_faults("keep_freed_memory()") < 1000 < 10_000 < page_faults("")
