"""SGLang's command line: the configured flags, and those that users must not set."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from rollout.server.config import RolloutServerConfig

_OUR_FLAGS = {
    "--model-path": "set model",
    "--model": "set model",
    "--host": "the engine listens on loopback for this server alone",
    "--port": "the engine takes a free port for this server alone",
    "--max-running-requests": "set max_running",
    "--context-length": "set max_context",
    "--stream-interval": "set stream_interval",
    "--incremental-streaming-output": "it is always on",
    "--skip-tokenizer-init": "it is always on: only token ids reach the engine",
    "--enable-return-routed-experts": "set record_routed_experts",
    "--weight-version": "it names the weights this server has loaded",
    "--trust-remote-code": "code from a model folder is never run",
    "--enable-memory-saver": "set lends_device",
}


# Settings that a running SGLang has been started with.
_AT_ITS_START = ("sglang_flags", "max_running", "max_context", "stream_interval")


def _refuse_ours(flags: Sequence[str]) -> None:
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in _OUR_FLAGS:
            raise ValueError(
                f"sglang_flags: {name} is set by the rollout server: {_OUR_FLAGS[name]}"
            )


def check_url(config: RolloutServerConfig) -> None:
    """Raise `ValueError` for fields that do not apply to an SGLang at a URL."""
    for name in _AT_ITS_START:
        if getattr(config, name) != RolloutServerConfig.model_fields[name].default:
            raise ValueError(
                f"{name} is for an SGLang that is started here: start the one at sglang_url with it"
            )


_SIZES = {
    "tp": ("--tp-size", "--tp", "--tensor-parallel-size"),
    "dp": ("--dp-size", "--dp", "--data-parallel-size"),
    "pp": ("--pp-size", "--pp", "--pipeline-parallel-size"),
}


def _size(flags: Sequence[str], kind: str) -> int | None:
    """How many devices the flags give to one kind of parallelism."""
    separate = [*(part for flag in flags for part in flag.split("=", 1)), ""]
    for flag, value in pairwise(separate):
        if flag.replace("_", "-") in _SIZES[kind] and value.isdecimal():
            return int(value)
    return None


def num_devices(config: RolloutServerConfig) -> int:
    """Devices that SGLang computes with: those assigned, else what its flags say."""
    sizes = (_size(config.sglang_flags, kind) or 1 for kind in _SIZES)
    return config.num_gpus or prod(sizes)


def _parallel_flags(config: RolloutServerConfig) -> list[str]:
    """Tensor parallelism over the assigned GPUs, unless it is given.

    Raises `ValueError` if the flags ask for more or fewer devices than are assigned.
    """
    tp, dp, pp = (_size(config.sglang_flags, kind) for kind in ("tp", "dp", "pp"))
    if not config.num_gpus or _on_cpu(config.sglang_flags):
        return []
    if "--enable-dp-attention" in config.sglang_flags:
        dp = 1  # its ranks are among those of tensor parallelism
    others = (dp or 1) * (pp or 1)
    if config.num_gpus != others * (tp or max(1, config.num_gpus // others)):
        raise ValueError(
            f"sglang_flags: tensor, data and pipeline parallelism of {tp or 'unset'}, {dp or 1} "
            f"and {pp or 1} do not make use of the {config.num_gpus} GPUs of this server: give "
            "sizes whose product that is, or leave --tp-size out"
        )
    return [] if tp else ["--tp-size", str(config.num_gpus // others)]


def _on_cpu(flags: Sequence[str]) -> bool:
    """Whether SGLang is told to compute on the CPU, which has no memory to release."""
    return "--device=cpu" in flags or ("--device", "cpu") in pairwise(flags)


def command_line(config: RolloutServerConfig) -> list[str]:
    """Return the command that starts SGLang for `config`, without address and weight label.

    Raises `ValueError` for flags that are not a user's to set.
    """
    assert config.model is not None
    _refuse_ours(config.sglang_flags)
    command = [*config.sglang_command, "--log-level-http", "warning", *config.sglang_flags]
    command += ["--model-path", str(config.model.resolve())]
    command += ["--max-running-requests", str(config.max_running)]
    command += ["--stream-interval", str(config.stream_interval)]
    command += ["--incremental-streaming-output", "--skip-tokenizer-init"]
    if config.record_routed_experts:
        command += ["--enable-return-routed-experts"]
    command += _parallel_flags(config)
    if config.lends_device and not _on_cpu(config.sglang_flags):
        command += ["--enable-memory-saver"]
    if config.max_context is not None:
        command += ["--context-length", str(config.max_context)]
    return command
