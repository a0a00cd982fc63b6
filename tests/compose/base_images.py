"""The base images: the published ones, or one of Debian's packages where no registry answers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from bench.provenance import ROOT

__all__ = ["base_images"]

_PUBLISHED = {"BASE_IMAGE": "python:3.11-slim-bookworm", "REDIS_IMAGE": "redis:7.4-bookworm"}
_LOCAL, _LOCAL_REDIS = "seamflow/local-base:bookworm", "seamflow/local-redis:bookworm"
_SUITE = "bookworm"
_PACKAGES = "python3,python3-venv,redis-server,ca-certificates"
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
_PIP_CONF = """[global]
find-links = /opt/wheels
cert = /etc/ssl/certs/ca-certificates.crt
"""


def base_images(folder: Path) -> Mapping[str, str]:
    """Variables of docker-compose.yml that name the images; `folder` is for building them."""
    if all(_pull(image) for image in _PUBLISHED.values()):
        return _PUBLISHED
    if not _exists(_LOCAL):
        _build(folder / "rootfs")
    _build_redis()
    # With the wheels of the local image; pip's own index serves the rest.
    return {"BASE_IMAGE": _LOCAL, "REDIS_IMAGE": _LOCAL_REDIS, "TORCH_INDEX_URL": ""}


def _pull(image: str) -> bool:
    command = ["docker", "pull", "--quiet", image]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _exists(image: str) -> bool:
    command = ["docker", "image", "inspect", image]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _build(rootfs: Path) -> None:
    """Python and Redis of Debian, with a wheel of torch for CPUs, as a root file system."""
    shutil.rmtree(rootfs, ignore_errors=True)
    packages = f"--include={_PACKAGES}"
    _run("debootstrap", "--variant=minbase", packages, _SUITE, str(rootfs))
    (rootfs / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    shutil.copy(_AUTHORITIES, rootfs / _AUTHORITIES.relative_to("/"))
    (rootfs / "etc/pip.conf").write_text(_PIP_CONF)
    wheels = rootfs / "opt/wheels"
    _run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", wheels, _torch())
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


def _torch() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    trainer: list[str] = project["optional-dependencies"]["trainer"]
    return next(each for each in trainer if each.startswith("torch=="))


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
