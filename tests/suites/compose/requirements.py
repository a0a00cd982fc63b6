"""What the tests in containers need of this machine, all of it named before anything begins."""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_REGISTRY = "https://registry-1.docker.io/v2/"
_REGISTRY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Something that is missing."""

    what: str
    """A program, or "root"."""
    reason: str
    package: str = ""
    """Debian's, which brings it; empty: nothing to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is there."""

    has: Callable[[str], bool]
    """Whether a program of this name is found."""
    is_root: bool
    engine_answers: bool
    """A Docker engine runs, and this user may use it."""
    has_compose_2: bool
    registry_answers: bool
    """That of the published base images."""


def this_machine() -> Machine:
    """As it is now; asks Docker and its registry."""
    has_docker = shutil.which("docker") is not None
    return Machine(
        has=lambda program: shutil.which(program) is not None,
        is_root=os.geteuid() == 0,
        engine_answers=has_docker and _succeeds("docker", "info"),
        has_compose_2=has_docker and _succeeds("docker", "compose", "version"),
        registry_answers=_registry_answers(),
    )


def lacking(machine: Machine) -> list[Need]:
    """Every need that is not met, in the order in which they would be noticed."""
    return list(dict.fromkeys(_lacking(machine)))


def _lacking(machine: Machine) -> Iterator[Need]:
    needs = [Need(what="docker", reason="the client", package="docker.io")]
    if not machine.has_compose_2:
        needs += [Need(what="docker-compose", reason="Compose", package="docker-compose")]
    if not machine.engine_answers:
        needs += [
            Need(what="dockerd", reason="no engine runs, so one is started", package="docker.io"),
            *(
                Need(what=each, reason="puts the packet filter back", package="iptables")
                for each in ("iptables", "iptables-save", "iptables-restore")
            ),
            Need(what="ip", reason="removes the engine's bridge", package="iproute2"),
        ]
    if not machine.registry_answers:
        reason = "no registry of images answers, so the base is made of packages"
        needs += [Need(what="debootstrap", reason=reason, package="debootstrap")]
        needs += [Need(what="tar", reason=reason, package="tar")]
    yield from (need for need in needs if not machine.has(need.what))
    if not machine.is_root and not (machine.engine_answers and machine.registry_answers):
        yield Need(what="root", reason="an engine, or a base image, is made here")


def message(needs: list[Need]) -> str:
    """All of them, and the line that installs what can be installed."""
    lines = [f"{len(needs)} missing:", *(f"  {need.what}: {need.reason}" for need in needs)]
    packages = sorted({need.package for need in needs} - {""})
    if packages:
        install = "apt-get install --yes --no-install-recommends"
        lines += [f"install them: apt-get update && {install} {' '.join(packages)}"]
    if any(need.what == "root" for need in needs):
        lines += ["run it as root"]
    return "\n".join(lines)


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _registry_answers() -> bool:
    try:
        with urllib.request.urlopen(_REGISTRY, timeout=_REGISTRY_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        with error:
            return error.code in (401, 429)  # asks for a token, or to wait: it is there
    except OSError:
        return False
