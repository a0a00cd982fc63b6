"""The same model with a tool, with LoRA, and on SGLang: one seed each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.baselines.generation.sglang_server import PYTHON as SGLANG
from bench.language_model.learning import figures_of
from bench.language_model.watched_run import WatchedRun, make_project, train
from bench.report import Report
from tools.provenance import ROOT

_LORA: dict[str, object] = {
    "trainer.lora.rank": 16,
    "trainer.optimizer.learning_rate": 2e-4,
}
_SGLANG_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--sleep-on-idle"),
    *("--max-total-tokens", "16384", "--mem-fraction-static", "0.1"),
)


def measure_tools(seeds: Sequence[int]) -> None:
    """Sums of numbers of three digits with a tool: examples/calculator."""
    settings = {"launcher.seed": seeds[0]}
    config = ROOT / "examples/calculator/calculator.toml"
    _publish("tools", train(ROOT, f"calculator-{seeds[0]}", settings, config), seeds[0])


def measure_lora(seeds: Sequence[int]) -> None:
    """The project's sums with adapters of rank 16 on frozen weights."""
    settings = _LORA | {"launcher.seed": seeds[0]}
    _publish("lora", train(make_project("lora"), "lora", settings), seeds[0])


def measure_sglang(seeds: Sequence[int]) -> None:
    """Ten steps of the project's sums on a real SGLang, float32 on the CPU.

    Raises:
        SystemExit: `make .venv-sglang` was not called.
    """
    if not SGLANG.exists():
        raise SystemExit(f"{SGLANG} is missing: `make .venv-sglang` makes it")
    settings: dict[str, object] = {
        "launcher.seed": seeds[0],
        "launcher.nodes": _toml("node-a: rollout", "node-b: train"),
        "trainer.num_steps": 10,
        "trainer.threads": 1,
        "rollout_server.engine": "sglang",
        "rollout_server.sglang_command": _toml(str(SGLANG), "-m", "sglang.launch_server"),
        "rollout_server.sglang_flags": _toml(*_SGLANG_FLAGS),
    }
    _publish("sglang", train(make_project("sglang"), "sglang", settings), seeds[0])


def _toml(*texts: str) -> str:
    """A list as --set takes it."""
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"


def _publish(name: str, run: WatchedRun, seed: int) -> None:
    summary = run.summary
    counts = ("weight_updates", "tokens_recorded", "turns_interrupted", "failed_rollouts")
    figures = figures_of(run) | {
        count: float(summary[count]) for count in counts if summary.get(count) is not None
    }
    raw: dict[str, list[Any]] = {
        "held_out": [line["mean"] for line in run.evaluations],
        "held_out_steps": [line["step"] for line in run.evaluations],
        "reward_mean": [step["reward_mean"] for step in run.steps],
        "logprob_diff": [step["train_rollout_logprob_abs_diff"] for step in run.steps],
    }
    Report(bench=f"language_model_{name}", figures=figures, raw=raw, seeds=[seed]).publish()
