"""How far forecasts are from what is measured: bytes of real ranks, published seconds of steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.size.model_shapes import MODELS
from bench.size.small_models import KINDS, make_model
from rollout.server.config import RolloutServerConfig
from services.node_agent.known_devices import device
from tools.plan.engine_size import engine_size
from tools.plan.run_shape import Lengths, RunShape
from tools.plan.step_seconds import step_seconds
from tools.plan.training_count import count_training
from trainer.config import TrainerConfig

ROOT = Path(__file__).parents[2]
RANKS, ROLLOUT_TOKENS, PROMPT_TOKENS = 2, 128, 32
_SETTINGS = {"dtype": "float32", "batch": {"micro_batch_tokens": 512, "logit_tokens": 128}}
_LOG_PROB_PASSES = 0.5
"""Of training, which passes forward twice and backward for the price of two: the published runs
pass forward twice more, for log-probs of the policy and of the reference."""
_MICRO_BATCH = 32_768
"""Tokens: the published runs keep layers in place, so that they gather no weights for each one."""
_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """A training step on H100s whose seconds were published."""

    model: str
    """Of `MODELS`."""
    mode: str
    """"on policy": all devices generate, then train; "one step off": half of them do each."""
    devices: int
    tensor_parallel: int
    """Devices of an engine."""
    mean_tokens: int
    seconds: float


SOURCE = (
    "https://github.com/NVIDIA-NeMo/RL/blob/06beed91bac98a2c39a19435f6bbbbe71aa45720"
    "/docs/about/performance-summary.md"
)
"""NeMo RL 0.4: GRPO on OpenMathInstruct-2, 64 prompts with 32 rollouts, at most 4,096 tokens."""
PUBLISHED = tuple(
    PublishedStep(
        model=model,
        mode=mode,
        devices=devices,
        tensor_parallel=parallel,
        mean_tokens=tokens,
        seconds=seconds,
    )
    for model, mode, devices, parallel, tokens, seconds in (
        ("llama-3.1-8b", "on policy", 16, 1, 1060, 97.7),
        ("llama-3.1-8b", "one step off", 16, 1, 1129, 74.6),
        ("qwen3-30b-a3b", "on policy", 32, 4, 3154, 225.0),
        ("qwen3-30b-a3b", "one step off", 32, 2, 3158, 244.0),
        ("qwen3-32b", "on policy", 32, 4, 3206, 393.0),
        ("qwen3-32b", "one step off", 64, 4, 3207, 215.0),
    )
)


def figures() -> dict[str, float]:
    """The largest error of bytes and of seconds, each as a share of what was measured."""
    return {
        "forecast_error_max": max(memory_error(kind) for kind in KINDS),
        "forecast_step_error_max": max(abs(step_error(each)) for each in PUBLISHED),
    }


def memory_error(kind: str, **settings: object) -> float:
    """Of the bytes of two real ranks that train a small model.

    Args:
        kind: of `KINDS`.
        settings: of the trainer.
    """
    with TemporaryDirectory() as folder:
        config = _config(make_model(Path(folder) / "model", kind), **{**_SETTINGS, **settings})
        measured = max(_measured(config, Path(folder)))
    return abs(_forecast(config, kind) / measured - 1)


def _forecast(config: TrainerConfig, kind: str) -> int:
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", kind)
        found = count_training(
            config.model_copy(update={"model": model}),
            ranks=RANKS,
            rollout_tokens=ROLLOUT_TOKENS,
            prompt_tokens=PROMPT_TOKENS,
        )
    return found.device_bytes


def _measured(config: TrainerConfig, folder: Path) -> Iterator[int]:
    """Bytes of each rank."""
    (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    arguments = {
        "--config": folder / "config.json",
        "--store": folder / "store",
        "--ranks": RANKS,
        "--rollout-tokens": ROLLOUT_TOKENS,
        "--prompt-tokens": PROMPT_TOKENS,
    }
    flags = [str(each) for pair in arguments.items() for each in pair]
    command = [sys.executable, "-m", "bench.size.measured_rank", *flags, "--rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (output, errors) in zip(ranks, said, strict=True):
        if rank.returncode:
            raise RuntimeError(f"a rank ended with code {rank.returncode}: {errors}")
        yield json.loads(output.splitlines()[-1])["bytes"]


def step_error(step: PublishedStep) -> float:
    """Of the forecast seconds, as a share of the published ones; below 0: too few."""
    return forecast_seconds(step) / step.seconds - 1


def forecast_seconds(step: PublishedStep) -> float:
    """Seconds of a step by the forecast, with the published run's passes for log-probs."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[step.model]))
        shape = _shape(step, Path(folder))
        count = count_training(
            shape.trainer,
            ranks=shape.ranks,
            rollout_tokens=step.mean_tokens,
            prompt_tokens=shape.lengths.prompt,
        )
        found = step_seconds(shape, count, engine_size(Path(folder)), device("h100-80"))
    if step.mode == "on policy":
        return found.step + _LOG_PROB_PASSES * found.training
    return max(found.step, (1 + _LOG_PROB_PASSES) * found.training + found.publish)


def _shape(step: PublishedStep, folder: Path) -> RunShape:
    """A node is the devices of one engine."""
    parallel, is_off = step.tensor_parallel, step.mode == "one step off"
    nodes = step.devices // parallel
    both = ("rollout", "train")
    split = [("train",)] * (nodes // 2) + [("rollout",)] * (nodes // 2)
    return RunShape(
        trainer=_config(
            folder, dtype="bfloat16", device="cuda", batch={"micro_batch_tokens": _MICRO_BATCH}
        ),
        rollout=RolloutServerConfig(
            engine="sglang", max_running=256, sglang_flags=("--tp-size", str(parallel))
        ),
        nodes=tuple(split) if is_off else (both,) * nodes,
        trainer_nodes=nodes // 2 if is_off else nodes,
        ranks_per_node=parallel,
        group_size=32,
        groups_per_step=64,
        max_staleness=int(is_off),
        lengths=Lengths(longest=4096, mean=step.mean_tokens, prompt=128),
    )


def _config(model: Path, **settings: object) -> TrainerConfig:
    given = {"run_id": "size", "model": model, "checkpoint": {"folder": model.parent}, **settings}
    return TrainerConfig.model_validate(given)


def _main() -> None:
    for each in PUBLISHED:
        found = forecast_seconds(each)
        print(f"{each.model}, {each.mode}: {each.seconds} s published, {found:.1f} s forecast")
    for kind in KINDS:
        print(f"{kind}: bytes of real ranks differ by {memory_error(kind):.2%}")


if __name__ == "__main__":
    _main()
