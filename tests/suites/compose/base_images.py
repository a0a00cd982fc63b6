"""The base images: the published ones, or one of Debian's packages where no registry answers."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.suites.compose.wheels import served_torch

_PUBLISHED = {"BASE_IMAGE": "python:3.11-slim-bookworm", "REDIS_IMAGE": "redis:7.4-bookworm"}
_LOCAL, _LOCAL_REDIS = "seamflow/local-base:bookworm", "seamflow/local-redis:bookworm"
_SUITE = "bookworm"
_PACKAGES = "python3,python3-venv,redis-server,ca-certificates"
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
_PIP_CONF = """[global]
cert = /etc/ssl/certs/ca-certificates.crt
trusted-host = {bridge}
"""


@contextmanager
def base_images(folder: Path) -> Iterator[Mapping[str, str]]:
    """Variables of docker-compose.yml that name the images; `folder` is for building them.

    While it is open, images of a local base find torch, for CPUs, where TORCH_INDEX_URL says; pip's
    own index serves the rest.
    """
    if all(_pull(image) for image in _PUBLISHED.values()):
        yield _PUBLISHED
        return
    bridge = _bridge()
    if not exists(_LOCAL):
        _build(folder / "rootfs", bridge)
    _build_redis()
    with served_torch(folder / "wheels", bridge) as index:
        yield {"BASE_IMAGE": _LOCAL, "REDIS_IMAGE": _LOCAL_REDIS, "TORCH_INDEX_URL": index}


def exists(image: str) -> bool:
    """Whether the engine has it."""
    command = ["docker", "image", "inspect", image]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _pull(image: str) -> bool:
    command = ["docker", "pull", "--quiet", image]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _bridge() -> str:
    """This machine's address, as containers see it while an image is built."""
    command = ["docker", "network", "inspect", "bridge"]
    (network,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    address: str = network["IPAM"]["Config"][0].get("Gateway", "172.17.0.1")
    return address


def _build(rootfs: Path, bridge: str) -> None:
    """Python and Redis of Debian as a root file system, without the packages they came in."""
    shutil.rmtree(rootfs, ignore_errors=True)
    packages = f"--include={_PACKAGES}"
    _run("debootstrap", "--variant=minbase", packages, _SUITE, str(rootfs))
    (rootfs / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    shutil.copy(_AUTHORITIES, rootfs / _AUTHORITIES.relative_to("/"))
    (rootfs / "etc/pip.conf").write_text(_PIP_CONF.format(bridge=bridge))
    for cache in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(rootfs / cache)
    tar = subprocess.Popen(["tar", "-C", rootfs, "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(["docker", "import", "-", _LOCAL], stdin=tar.stdout, check=True)
    if tar.wait() != 0:
        raise RuntimeError(f"tar of {rootfs} failed")
    shutil.rmtree(rootfs)


def _build_redis() -> None:
    """As the published image: its user owns the folder of the volume."""
    code = "import os; os.makedirs('/data'); os.chown('/data', 999, 999)"
    lines = f'FROM {_LOCAL}\nRUN ["python3", "-c", "{code}"]\n'
    command = ["docker", "build", "--quiet", "--tag", _LOCAL_REDIS, "-"]
    subprocess.run(command, input=lines, text=True, check=True, stdout=subprocess.DEVNULL)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
