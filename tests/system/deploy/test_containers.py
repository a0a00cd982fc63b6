"""`make up` and `make images`: what they ask of Compose, written down by a program in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import containers

_RECORDS = """#!/bin/sh
echo "$(basename "$0") $*" >> {calls}
[ "$1" != compose ] || exit 1
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of `docker` and `docker-compose`, one a line; Docker has no Compose 2."""
    file = tmp_path / "calls"
    for name in ("docker", "docker-compose"):
        (tmp_path / name).write_text(_RECORDS.format(calls=file))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(containers, "_write_credential", lambda: None)
    monkeypatch.setattr(containers, "_write_console_link", lambda: None)
    containers._command.cache_clear()
    return file


def composed(calls: Path) -> list[str]:
    """Those of Compose, without the project's name."""
    start = "docker-compose --project-name seamflow "
    lines = calls.read_text().splitlines()
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def test_up_builds_once_and_starts_what_is_there(calls: Path) -> None:
    """Nothing is pulled or built by the start itself."""
    containers.up(["sglang"])
    flags = "--profile sglang"
    assert composed(calls) == [f"{flags} build", f"{flags} up --detach --no-build"]


def test_images_come_from_their_own_file(calls: Path) -> None:
    """With the node pools' image; that of SGLang where it is asked for, and no other profile."""
    assert containers.main(["images", "--profile", "sglang", "--profile", "scoring"]) == 0
    files = f"--project-directory {containers.ROOT} --file {containers.ROOT}"
    expected = f"{files}/deploy/compose.images.yml --profile node --profile sglang build"
    assert composed(calls) == [expected]


def test_without_docker_the_cure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 69."""
    monkeypatch.setenv("PATH", str(tmp_path))
    containers._command.cache_clear()
    assert containers.main(["images"]) == 69
    assert "install Docker and Compose" in capsys.readouterr().err


def test_the_ports_of_the_environment_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docker-compose.yml publishes them."""
    monkeypatch.setenv("HTTP_GATEWAY_PORT", "8081")
    containers._print_addresses()
    printed = capsys.readouterr().out
    assert "https://127.0.0.1:8081" in printed
    assert "127.0.0.1:50052 quickstart runs/compose/agent" in printed
