"""Starting SGLang: its flags, why it did not start, and that it never outlives its server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout.server.config import RolloutServerConfig
from rollout.server.engines import build_engine
from rollout.server.engines.sglang.command_line import command_line
from services.chassis.errors import ConfigError
from tests.lib.rollout.server.support import save_model


@pytest.mark.parametrize(
    ("flag", "cure"),
    [
        ("--model-path=x", "set model"),
        ("--stream_interval", "set stream_interval"),
        ("--port", "free port"),
        ("--trust-remote-code", "never run"),
        ("--enable-memory-saver", "set lends_device"),
    ],
)
def test_flags_that_are_not_the_users_are_refused(flag: str, cure: str, tmp_path: Path) -> None:
    """What the rollout server itself decides is named with what to set instead."""
    config = RolloutServerConfig(
        engine="sglang", model=save_model(tmp_path / "m"), sglang_flags=(flag, "2")
    )
    with pytest.raises(ConfigError, match=f"is set by the rollout server: .*{cure}"):
        build_engine(config)


@pytest.mark.parametrize(
    "field",
    [
        {"sglang_flags": ("--tp-size", "2")},
        {"max_running": 8},
        {"max_context": 100},
        {"stream_interval": 1},
    ],
)
def test_what_a_running_sglang_never_hears_of_is_refused(
    field: dict[str, Any], tmp_path: Path
) -> None:
    """With a URL, an error names a field that only applies when SGLang is started."""
    url: dict[str, Any] = {
        "engine": "sglang",
        "model": save_model(tmp_path / "m"),
        "sglang_url": "http://a:1",
    }
    build_engine(RolloutServerConfig(**url))
    with pytest.raises(ConfigError, match=f"{next(iter(field))} is for an SGLang that is started"):
        build_engine(RolloutServerConfig(**url, **field))


def test_command_line_has_the_users_flags_and_ours_after_them(tmp_path: Path) -> None:
    """Ours come last, so that they win over an abbreviation that means the same."""
    config = RolloutServerConfig(
        engine="sglang",
        model=save_model(tmp_path / "m"),
        max_running=7,
        max_context=99,
        sglang_command=("python", "-m", "sglang.launch_server"),
        sglang_flags=("--tp-size", "2"),
    )
    command = command_line(config)
    assert command[:3] == ["python", "-m", "sglang.launch_server"]
    assert command.index("--tp-size") < command.index("--model-path")
    assert command[command.index("--max-running-requests") + 1] == "7"
    assert command[command.index("--context-length") + 1] == "99"


@pytest.mark.parametrize(
    ("lends", "flags", "saver"),
    [
        (True, (), True),
        (False, (), False),
        (True, ("--device", "cuda"), True),
        (True, ("--device", "cpu"), False),
        (True, ("--device=cpu",), False),
    ],
)
def test_an_engine_that_lends_its_device_has_the_memory_saver(
    lends: bool, flags: tuple[str, ...], saver: bool, tmp_path: Path
) -> None:
    """On a CPU there is no memory of a device, and no memory saver."""
    config = RolloutServerConfig(model=tmp_path, lends_device=lends, sglang_flags=flags)
    assert ("--enable-memory-saver" in command_line(config)) == saver
