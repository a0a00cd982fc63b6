"""`make up`, `make health`, `make down`: the containers of docker-compose.yml; `make images`.

    python3 deploy/containers.py up [--profile scoring …]

`up` builds and starts them, waits until every one is healthy or, for a job, done, and writes what
an agent on this machine needs to runs/compose/agent: token and certificates. With the profile
scoring the run demands the column that is scored, so choose it when the run begins. It needs Docker
with Compose 1.29 or 2, and Python's standard library. `images` builds those of a deployment, one
for each service, of deploy/compose.images.yml; with the profile sglang, its image too.

Exit codes: 0 all healthy, 69 no Docker, 70 a container failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "AGENT_FOLDER",
    "Container",
    "build_images",
    "compose",
    "containers",
    "down",
    "health_line",
    "main",
    "up",
]

ROOT = Path(__file__).parents[1]
PROJECT = "seamflow"
AGENT_FOLDER = ROOT / "runs" / "compose" / "agent"
CONSOLE_LINK = ROOT / "runs" / "compose" / "console"
"""File with the link that lets a browser into the console."""
_IMAGES = ROOT / "deploy" / "compose.images.yml"
_UNAVAILABLE, _FAILED = 69, 70
_POLL_SECONDS = 2.0
_PROFILES = ("environments", "operator", "scoring", "sglang")
_COLUMN = {"SCORING_COLUMN": "ref_logprobs"}
"""What the service of the profile scoring writes: variables of docker-compose.yml."""
_READ_CREDENTIAL = """
import json, pathlib
files = {"token": "agent_token", "ca.pem": "ca.pem",
         "cert.pem": "agent-runner/cert.pem", "key.pem": "agent-runner/key.pem"}
folder = pathlib.Path("/secrets")
print(json.dumps({name: (folder / file).read_text() for name, file in files.items()}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container, as Docker sees it."""

    service: str
    """Its name in docker-compose.yml."""
    status: str
    """created, running, restarting, exited, …"""
    health: str | None
    """starting, healthy or unhealthy; None: it has no health check."""
    exit_code: int

    @property
    def is_ready(self) -> bool:
        """Healthy, or a job that is done."""
        if self.status == "exited":
            return self.exit_code == 0
        return self.status == "running" and self.health in (None, "healthy")

    @property
    def has_failed(self) -> bool:
        """Ended with an error."""
        return self.status in ("exited", "dead") and self.exit_code != 0

    def __str__(self) -> str:
        state = self.health if self.status == "running" and self.health else self.status
        return f"{self.service} {state}" + (f" ({self.exit_code})" if self.has_failed else "")


@functools.cache
def _command() -> tuple[str, ...]:
    """Compose 2 if Docker has it, else the program of Compose 1."""
    asked = ["docker", "compose", "version"]
    has_version_2 = subprocess.run(asked, capture_output=True, check=False).returncode == 0
    return ("docker", "compose") if has_version_2 else ("docker-compose",)


def compose(*arguments: str, capture: bool = False) -> str:
    """Run Compose on the project; returns what it printed if `capture`.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    done = subprocess.run(
        [*_command(), "--project-name", PROJECT, *arguments],
        cwd=ROOT,
        check=True,
        text=True,
        stdout=subprocess.PIPE if capture else None,
    )
    return done.stdout or ""


def containers() -> list[Container]:
    """All containers of the project, by service."""
    label = f"label=com.docker.compose.project={PROJECT}"
    names = _docker("ps", "--all", "--quiet", "--filter", label).split()
    found = json.loads(_docker("inspect", *names)) if names else []
    return sorted(map(_container, found), key=lambda each: each.service)


def _container(found: dict[str, dict[str, object]]) -> Container:
    state, labels = found["State"], found["Config"]["Labels"]
    assert isinstance(labels, dict)
    health = state.get("Health")
    return Container(
        service=labels["com.docker.compose.service"],
        status=str(state["Status"]),
        health=health["Status"] if isinstance(health, dict) else None,
        exit_code=int(str(state["ExitCode"])),
    )


def _docker(*arguments: str) -> str:
    command = ["docker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def health_line(found: Sequence[Container]) -> str:
    """ "14 of 17 ready; waiting for prepare running, trainer created"."""
    waiting = [str(each) for each in found if not each.is_ready]
    line = f"{len(found) - len(waiting)} of {len(found)} ready"
    return f"{line}; waiting for {', '.join(waiting)}" if waiting else line


def up(profiles: Iterable[str] = (), *, build: bool = True) -> None:
    """Build, start, wait, and write the agent's credential; `build` False: the images are there.

    Raises:
        RuntimeError: a container ended with an error.
    """
    names = tuple(profiles)
    if "scoring" in names:
        os.environ.update(_COLUMN)
    flags = chosen(names)
    if build:
        compose(*flags, "build")
    try:
        # Compose itself waits for the jobs that others depend on.
        compose(*flags, "up", "--detach", "--no-build")
    except subprocess.CalledProcessError:
        _check(containers())  # names the container that failed, and shows what it said
        raise
    _wait()
    _write_credential()
    _write_console_link()


def build_images(profiles: Iterable[str] = (), *, quiet: bool = False) -> None:
    """Build the image of each service, and that of the chart's node pools."""
    files = ("--project-directory", str(ROOT), "--file", str(_IMAGES))
    flags = chosen(("node", *profiles))
    compose(*files, *flags, "build", *(["--quiet"] if quiet else []))


def down(*arguments: str) -> None:
    """Stop and remove the containers of every profile; `arguments` are Compose's, as --volumes."""
    compose(*chosen(_PROFILES), "down", "--remove-orphans", *arguments)


def chosen(profiles: Iterable[str]) -> list[str]:
    """Flags of Compose that add the services of these profiles."""
    return [word for name in profiles for word in ("--profile", name)]


def _wait() -> None:
    shown = ""
    while True:
        found = containers()
        _check(found)
        if (line := health_line(found)) != shown:
            print(line, flush=True)
            shown = line
        if all(each.is_ready for each in found):
            return
        time.sleep(_POLL_SECONDS)


def _check(found: Sequence[Container]) -> None:
    if failed := [each for each in found if each.has_failed]:
        compose("logs", "--tail", "30", *[each.service for each in failed])
        raise RuntimeError(f"ended with an error: {', '.join(map(str, failed))}")


def _write_credential() -> None:
    """The certificates and the token of agents, readable by the caller alone."""
    text = compose("exec", "-T", "agent-runner", "python", "-c", _READ_CREDENTIAL, capture=True)
    for name, content in json.loads(text).items():
        _write_private(AGENT_FOLDER / name, content)


def _write_console_link() -> None:
    """The link that lets a browser of this machine into the console."""
    file = "/secrets/console_access_token"
    token = compose("exec", "-T", "console", "cat", file, capture=True).strip()
    port = os.environ.get("CONSOLE_PORT") or 8090
    _write_private(CONSOLE_LINK, f"https://127.0.0.1:{port}/?token={token}\n")


def _write_private(path: Path, content: str) -> None:
    """For the caller alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)


def _print_addresses() -> None:
    folder = AGENT_FOLDER.relative_to(ROOT)
    grpc = f"127.0.0.1:{os.environ.get('GATEWAY_PORT') or 50052}"
    http = f"https://127.0.0.1:{os.environ.get('HTTP_GATEWAY_PORT') or 8080}"
    print(f"gRPC {grpc}, HTTP {http}, credentials in {folder}. Try:")
    print(f"  python examples/minimal_agent.py {grpc} quickstart {folder}")
    print("or the agent over HTTP of docs/deployment.md")
    link = CONSOLE_LINK.relative_to(ROOT)
    print(f"console: the link in {link}; ca.pem signed its certificate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("up", "health", "down", "images"))
    also = parser.add_argument("--profile", action="append", default=[], choices=_PROFILES)
    also.help = "also these services"
    given = parser.parse_args(argv)
    try:
        return _run(given.command, given.profile)
    except FileNotFoundError as error:
        return _end(f"{error.filename} is missing: install Docker and Compose", _UNAVAILABLE)
    except (subprocess.CalledProcessError, RuntimeError) as error:
        return _end(str(error), _FAILED)


def _run(command: str, profiles: Sequence[str]) -> int:
    if command == "up":
        up(profiles)
        _print_addresses()
    elif command == "images":
        build_images(name for name in profiles if name == "sglang")
    elif command == "health":
        found = containers()
        print(health_line(found))
        return 0 if found and all(each.is_ready for each in found) else _FAILED
    else:
        down()
    return 0


def _end(message: str, code: int) -> int:
    sys.stderr.write(f"containers: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
