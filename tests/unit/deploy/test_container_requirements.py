"""What `make test-compose` needs is named whole, before it begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.suites.compose.engine import EngineUnavailableError, engine
from tests.suites.compose.host_agent import is_trained, program
from tests.suites.compose.images import parsed
from tests.suites.compose.requirements import Machine, lacking, message

BARE = Machine(
    has=lambda _: False,
    is_root=False,
    engine_answers=False,
    has_compose_2=False,
    registry_answers=False,
)


FULL = dataclasses.replace(BARE, has=lambda _: True, is_root=True)


PROGRAMS = ["docker", "docker-compose", "dockerd", "iptables", "iptables-save", "iptables-restore"]


PROGRAMS += ["ip", "debootstrap", "tar"]


def names(machine: Machine) -> list[str]:
    """What is missing."""
    return [need.what for need in lacking(machine)]


def test_a_bare_machine_lacks_everything_and_is_told_so_once() -> None:
    """One message, with one line that installs."""
    assert names(BARE) == [*PROGRAMS, "root"]
    (install,) = [line for line in message(lacking(BARE)).splitlines() if "apt-get" in line]
    assert install.endswith("debootstrap docker-compose docker.io iproute2 iptables tar")


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_is_missed(program: str) -> None:
    """By its own name; with it nothing is missing."""
    assert names(dataclasses.replace(FULL, has=lambda each: each != program)) == [program]
    assert names(FULL) == []


def test_a_running_engine_needs_no_root() -> None:
    """Nor what starts one; a base of packages needs both."""
    running = dataclasses.replace(
        BARE,
        has=lambda each: each == "docker",
        engine_answers=True,
        has_compose_2=True,
        registry_answers=True,
    )
    assert names(running) == []
    alone = dataclasses.replace(running, registry_answers=False)
    assert names(alone) == ["debootstrap", "tar", "root"]


def test_nothing_begins_on_a_machine_that_lacks_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the folder of the engine."""
    monkeypatch.setattr("tests.suites.compose.engine.this_machine", lambda: BARE)
    with pytest.raises(EngineUnavailableError, match="10 missing"), engine(tmp_path / "data"):
        pass
    assert not (tmp_path / "data").exists()


def test_the_page_has_the_agent_that_is_run(tmp_path: Path) -> None:
    """One program that compiles, with address, authority and token; without it, an error."""
    text = program()
    compile(text, "host_agent.py", "exec")
    assert "runs/compose/agent" in text and "https://127.0.0.1:8080" in text
    empty = tmp_path / "page.md"
    empty.write_text("## An agent on this machine, over HTTP\n\nnothing\n\n## Next\n")
    with pytest.raises(ValueError, match="0 programs"):
        program(empty)


def test_a_trained_rollout_is_found_by_its_sample() -> None:
    """And another one is not."""
    trained = '{"step": 1, "sample_ids": ["r/1#t2"]}\n{"step": 2, "sample_ids": []}\n'
    assert is_trained(["r/1"], trained)
    assert not is_trained(["r/2", "r"], trained)


def test_sizes_are_read_as_docker_prints_them() -> None:
    """Decimal units, and no guess."""
    assert parsed("812.5MB") == pytest.approx(0.8125)
    assert parsed("2.5GB") == 2.5
    with pytest.raises(ValueError, match="is no size"):
        parsed("much")


def test_the_network_is_remembered_before_the_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And put back after it has ended: what it adds at its start must not be remembered."""
    order: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        order.append(f"{name} begins")
        yield
        order.append(f"{name} ends")

    monkeypatch.setattr("tests.suites.compose.engine.this_machine", lambda: FULL)
    monkeypatch.setattr("tests.suites.compose.engine._own_engine", lambda _: noted("engine"))
    monkeypatch.setattr("tests.suites.compose.engine._network_restored", lambda: noted("network"))
    with engine(tmp_path) as is_own:
        assert is_own
    assert order == ["network begins", "engine begins", "engine ends", "network ends"]
