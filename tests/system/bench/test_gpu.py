"""`make bench-gpu DEVICE=cpu`: every part runs, so that it does on its first GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.end_to_end.support import ROOT, child_environment

_POSITIVE = (
    "trained_tokens_per_second",
    "restore_over_copy",
    "publish_over_copy",
    "torch.decode_over_bandwidth_4",
    "torch.weights_hidden_share",
    "torch.engine_released_gb",
)


@pytest.mark.long(short="tests/system/bench/test_gpu.py")
def test_every_part_is_measured_without_a_gpu(tmp_path: Path) -> None:
    """Figures are positive, and the forecast of a rank's bytes is right here too."""
    done = _bench("--device", "cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "gpu.json").read_text())
    figures = result["figures"]
    assert all(figures[name] > 0 for name in _POSITIVE), figures
    assert figures["forecast_bytes_error"] < 0.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "torch sees no GPU"), (("--device", "tpu"), "invalid choice: 'tpu'")],
)
def test_a_missing_device_is_named(arguments: tuple[str, ...], said: str) -> None:
    """With the way to try it without one."""
    done = _bench(*arguments)
    assert done.returncode
    assert said in done.stderr


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu", *arguments],
        cwd=ROOT,
        env=child_environment({"CUDA_VISIBLE_DEVICES": ""}),
        capture_output=True,
        text=True,
        check=False,
    )
