"""Releases that cannot work together say so at the first call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from packaging.version import Version
from seamflow import channel as channel_module
from seamflow.channel import connect
from seamflow.errors import PreconditionError, decode
from seamflow.release import HEADER, RELEASE, __version__, works_with

from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import started
from tests.chassis.support import demo_service

START = "/seamflow.rollout.v1.RolloutService/StartRollout"
ROOT = Path(__file__).parents[3]
MAJOR, MINOR = (int(part) for part in RELEASE.split("."))


@pytest.mark.parametrize(
    ("other", "works"),
    [
        ("3.4", True),
        ("3.5", True),
        ("3.3", True),
        ("3.6", False),
        ("3.2", False),
        ("2.4", False),
        ("4.4", False),
        ("3.4.1", False),
        ("", False),
        ("new", False),
    ],
)
def test_releases_one_minor_version_apart_work_together(other: str, works: bool) -> None:
    """One before and one after; no other major version; no other form."""
    assert works_with(other, "3.4") is works


def test_the_release_is_that_of_the_version() -> None:
    """<major>.<minor>."""
    assert __version__.startswith(f"{RELEASE}.")


def test_the_version_is_above_the_newest_release() -> None:
    """What is not released yet has a number of its own, so that its contract is told apart."""
    headings = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    newest = headings[0]
    assert works_with(".".join(newest.split(".")[:2]))
    assert Version(newest) < Version(__version__)
    assert Version("0.2.0") < Version("0.3.0.dev0") < Version("0.3.0"), "as versions compare"


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("docker-compose.yml", r"image: seamflow/[\w-]+:(\S+)"),
        ("deploy/helm/seamflow/Chart.yaml", r"appVersion: (\S+)"),
        ("pyproject.toml", r'^version = "(\S+)"'),
    ],
)
def test_images_and_packages_have_the_same_version(file: str, pattern: str) -> None:
    """All that names it."""
    assert {*re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)} == {__version__}


async def start(port: int, **options: Any) -> None:
    """A call of this release, or with other metadata on a plain channel."""
    address = f"127.0.0.1:{port}"
    async with (
        grpc.aio.insecure_channel(address) if options else connect(address) as channel,
    ):
        call: Any = channel.unary_unary(START)
        await call(b"", timeout=10, **options)


async def test_a_caller_of_a_far_release_is_refused() -> None:
    """FAILED_PRECONDITION with both releases, the service and the cure, again and again."""
    far = f"{MAJOR}.{MINOR + 2}"
    async with started(demo_service(), ServerConfig(), "demo") as port:
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await start(port, metadata=((HEADER, far),))
            error = decode(refused.value)
            assert isinstance(error, PreconditionError)
            assert error.reason == "RELEASES_TOO_FAR_APART"
            assert error.metadata["caller_release"] == far
            assert error.metadata["server_release"] == RELEASE
            for part in (far, RELEASE, "demo", "update"):
                assert part in str(error)


async def test_near_and_unknown_callers_are_served() -> None:
    """Negative control: this release, the next one, and a foreign client without the header."""
    async with started(demo_service(), ServerConfig()) as port:
        await start(port)
        await start(port, metadata=((HEADER, f"{MAJOR}.{MINOR + 1}"),))
        await start(port, metadata=(("other", "1"),))


async def test_this_package_sends_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `connect` sends is checked: with another release it is refused."""
    async with started(demo_service(), ServerConfig()) as port:
        monkeypatch.setattr(channel_module, "RELEASE", f"{MAJOR + 1}.0")
        with pytest.raises(grpc.aio.AioRpcError, match="update the older one"):
            await start(port)
