"""The names that let SGLang load without a GPU: importable, inert, and loud when called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NAMES = Path(__file__).parents[3] / "deploy/sglang_cpu"
# What SGLang does with these names while its modules load, in small.
SGLANG = """
import torch
import torchvision.transforms
import triton
import triton.language as tl
from sgl_kernel import copy_cache

@triton.jit
def plain(x: tl.constexpr | None):
    return x

@triton.autotune(configs=[triton.Config({"BLOCK": 16}, num_warps=4)], key=["n"])
@triton.jit(do_not_specialize=["n"])
def tuned(n):
    return n

class Transform(torchvision.transforms.Compose):
    pass

assert not isinstance(1, tl.dtype)
assert not hasattr(triton.runtime.driver, "active")
assert not torch.utils._triton.has_triton()
for kernel in (plain, tuned):
    try:
        kernel[(1,)](1)
    except NotImplementedError as error:
        print(error)
"""


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code where a package `sglang` and the names can be imported."""
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").write_text(SGLANG)
    path = os.pathsep.join((str(folder), str(NAMES)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_kernels_can_be_declared_but_not_called(tmp_path: Path) -> None:
    """Decorators, types and bases work, torch sees no triton, and a call names its kernel."""
    done = python(tmp_path, "import sglang_cpu_names, sglang")
    assert done.returncode == 0, done.stderr
    says = "is a GPU kernel; this is SGLang's CPU environment"
    assert done.stdout.splitlines() == [f"plain {says}", f"tuned {says}"]


def test_nothing_is_inert_before_sglang_is_imported(tmp_path: Path) -> None:
    """Other programs in the environment see that there is no triton."""
    done = python(tmp_path, "import sglang_cpu_names, triton")
    assert "No module named 'triton'" in done.stderr
