"""`make bench-gpu`: our trainer and engines on a GPU, beside what the GPU can do.

Each part has the device for itself, in a process of its own. With --device cpu all of it runs
without a GPU, on a small model, to see that it does; such figures say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.gpu.device_speed import bytes_per_second, host_bytes_per_second, products_per_second
from bench.report import RESULTS, Report
from bench.size.model_shapes import MODELS
from bench.size.small_models import make_model, save_model
from services.node_agent.known_devices import find_device

_SMALL = "tied"
ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all parts."""
    given = _parser().parse_args(argv)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench-gpu: torch sees no GPU; DEVICE=cpu tries every part without one")
    with TemporaryDirectory(prefix="seamflow-gpu-") as folder:
        model = _model(Path(folder) / "model", given)
        figures = {
            **_device_figures(given.device),
            **_part("bench.gpu.training_rank", str(model), given.device),
            **dict(_engines(model, Path(folder), given)),
        }
    report = Report(
        bench="gpu", figures=_with_peaks(figures), packages=("torch", "transformers", "sglang")
    )
    report.publish(given.out or (RESULTS if given.device == "cuda" else ROOT / "runs" / "bench"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench-gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--model",
        default="qwen3-1.7b",
        help=f"with random weights: {', '.join(MODELS)}; on the CPU a small one",
    )
    parser.add_argument(
        "--sglang", default="", help="Python that has SGLang; empty: the embedded engine alone"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of gpu.json; unset: bench/results, or runs/bench without a GPU",
    )
    return parser


def _model(folder: Path, given: argparse.Namespace) -> Path:
    if given.device == "cpu":
        return make_model(folder, _SMALL)
    if given.model not in MODELS:
        sys.exit(f"bench-gpu: --model is {given.model!r}: give one of {', '.join(MODELS)}")
    return save_model(folder, MODELS[given.model], torch.bfloat16)


def _device_figures(device: str) -> dict[str, float]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return {
        "product_tflops": products_per_second(device, dtype) / 1e12,
        "copied_gb_per_second": bytes_per_second(device) / 1e9,
        "from_host_gb_per_second": host_bytes_per_second(device) / 1e9,
    }


def _engines(model: Path, folder: Path, given: argparse.Namespace) -> Iterator[tuple[str, float]]:
    settings: dict[str, object] = {"torch_device": given.device, "stream_interval": 1}
    if given.device == "cuda":
        settings |= {"max_running": 256, "max_context": 4096}
    yield from _engine(model, folder, given.device, settings, "torch").items()
    if given.sglang:
        command = (given.sglang, "-m", "sglang.launch_server")
        settings |= {"sglang_command": command, "lends_device": given.device == "cuda"}
        yield from _engine(model, folder, given.device, settings, "sglang").items()


def _engine(
    model: Path, folder: Path, device: str, settings: dict[str, object], engine: str
) -> dict[str, float]:
    """Figures of an engine, each named after it."""
    file = folder / f"{engine}.json"
    given = {"run_id": "gpu", "model": str(model), "engine": engine, **settings}
    file.write_text(json.dumps(given))
    found = _part("bench.gpu.engine_run", "--config", str(file), "--device", device)
    return {f"{engine}.{name}": value for name, value in found.items()}


def _part(module: str, *arguments: str) -> dict[str, float]:
    print(f"measuring {module}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _with_peaks(figures: dict[str, float]) -> dict[str, float]:
    """Add shares of the data sheet, if the device is a known one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = find_device(name)
    if known is None:
        return figures
    return {
        **figures,
        "mfu": figures["training_tflops"] * 1e12 / known.flops,
        "product_over_peak": figures["product_tflops"] * 1e12 / known.flops,
        "copy_over_peak": figures["copied_gb_per_second"] * 1e9 / known.bandwidth,
    }


if __name__ == "__main__":
    main()
