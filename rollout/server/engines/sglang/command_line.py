"""SGLang's command line: the configured flags, and those that users must not set."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rollout.server.config import RolloutServerConfig

__all__ = ["check_url", "command_line"]

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
    if config.lends_device and not _on_cpu(config.sglang_flags):
        command += ["--enable-memory-saver"]
    if config.max_context is not None:
        command += ["--context-length", str(config.max_context)]
    return command
