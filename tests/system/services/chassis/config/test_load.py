"""Configuration of a real process: exit codes, and what it prints."""

from __future__ import annotations

from pathlib import Path

from services.chassis.errors import ExitCode
from tests.lib.chassis.support import demo


def test_exit_codes_of_a_real_process(tmp_path: Path) -> None:
    """Usage is 64, configuration 78, a missing dependency 69, a crash 70; stderr has the cause."""
    usage = demo("--prot=1")
    assert (usage.returncode, usage.stderr) == (
        ExitCode.USAGE,
        "demo: unknown argument --prot=1; did you mean --port?\n",
    )
    assert demo(SEAMFLOW_DEMO_PORT="one").returncode == ExitCode.CONFIG
    dependency = demo("--mode=dependency")
    assert (dependency.returncode, dependency.stderr) == (
        ExitCode.UNAVAILABLE,
        "demo: demo: nobody there\n",
    )
    assert demo("--mode=crash").returncode == ExitCode.BUG


def test_print_config_shows_values_and_where_they_come_from() -> None:
    """--print-config prints TOML with the origin of each value and no secret; nothing is served."""
    shown = demo("--print-config", "--port=5", SEAMFLOW_DEMO_TOKEN="s3cret")
    assert shown.returncode == ExitCode.CLEAN
    assert "port = 5  # --port\n" in shown.stdout
    assert 'token = "***"  # SEAMFLOW_DEMO_TOKEN\n' in shown.stdout
    assert 'host = "127.0.0.1"  # default\n' in shown.stdout
    assert "s3cret" not in shown.stdout + shown.stderr
