"""A run stays what it began as: by the same rules, from the same model, one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from seamflow.inspect.run_files import json_object

from services.chassis.errors import ConfigError
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout
from services.launcher.run_rules import rules
from services.lib.model_files.json_file import read_object
from services.lib.model_files.weight_headers import weight_files

FILE = "began_with.json"
CREATION_FILE = "created_at"
"""When the run was created, by the store's clock: an emptied or another store differs."""

_SAMPLE_BYTES = 1 << 20
_NO_SHAPE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
LOCK_FILE = "run.lock"


def check_same_run(config: LauncherConfig, layout: Layout) -> None:
    """Compare with what the run began with, before anything starts.

    Raises:
        ConfigError: names what differs, both values and the cure.
    """
    began, now = json_object(layout.folder / FILE), _facts(config, layout)
    if not began:
        return  # a new run, or one of an older release: its trajectory manager compares
    rules_then, rules_now = began.get("rules", {}), now["rules"]
    differing = [
        f"{name} (was {rules_then.get(name)}, is {rules_now.get(name)})"
        for name in sorted({*rules_then, *rules_now})
        if rules_then.get(name) != rules_now.get(name)
    ]
    if differing:
        raise ConfigError(
            f"run {config.name!r} began with other rules: {', '.join(differing)}; set them back, "
            "or start a new run by another --name"
        )
    _check_model(config, layout, began.get("model") or {}, now["model"])


def note_beginning(config: LauncherConfig, layout: Layout) -> None:
    """Write down what the run begins with and an earlier call did not know.

    That may be the model, which is prepared after the first call.
    """
    file = layout.folder / FILE
    began = json_object(file)
    if not began.get("model"):
        facts = _facts(config, layout) | {name: value for name, value in began.items() if value}
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        partial.rename(file)


def check_same_store(config: LauncherConfig, layout: Layout, created_at: str) -> None:
    """Compare the store's run with the one that the folder belongs to.

    Args:
        config: of the run.
        layout: of the run.
        created_at: when the store has created the run; empty: it has none.

    Raises:
        ConfigError: names what is lost, and the cure.
    """
    file = layout.folder / CREATION_FILE
    began = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    if began in ("", created_at):
        return
    found = f"another run of that name, of {created_at}" if created_at else "no such run"
    data = f", {layout.folder / 'redis'}" if "redis" in layout.ports else ""
    raise ConfigError(
        f"run {config.name!r} began at {began}, and the store has {found}: its rollouts, samples "
        f"and step ledger are lost. Start Redis on the data it had{data}, or restore a backup "
        "(docs/runbooks/restore.md); to go on from the newest checkpoint without them, add "
        "--set trainer.accept_lost_samples=true"
    )


def note_creation(layout: Layout, created_at: str) -> None:
    """Write down when the store has created the run."""
    (layout.folder / CREATION_FILE).write_text(created_at + "\n", encoding="utf-8")


def _check_model(
    config: LauncherConfig, layout: Layout, then: Mapping[str, str], now: Mapping[str, str]
) -> None:
    differing = [name for name in then if name in now and then[name] != now[name]]
    if differing:
        raise ConfigError(
            f"model is {layout.path(config.model)!r}, and run {config.name!r} began with another "
            f"one: {' and '.join(differing)} differ; give that model, or start a new run by "
            "another --name"
        )


def _facts(config: LauncherConfig, layout: Layout) -> dict[str, Any]:
    """As JSON gives them back; of a model that is still to be prepared, nothing."""
    is_there = config.prepare is None or layout.prepared_marker.is_file()
    own = config.replace(required_columns=config.columns)
    folder = Path(layout.path(config.model))
    return {
        "rules": MessageToDict(rules(own), preserving_proto_field_name=True),
        "model": dict(fingerprint(folder)) if is_there else {},
    }


def fingerprint(folder: Path) -> Mapping[str, str]:
    """Digests of the folder's "architecture" and "weights", wherever it lies.

    Of each file of weights, the size and 1 MiB at its beginning, with names and shapes, in the
    middle and at its end are read.

    Raises:
        ValueError: a file is missing or damaged.
    """
    config = read_object(folder, "config.json")
    shape = {name: value for name, value in config.items() if name not in _NO_SHAPE}
    weights = hashlib.sha256()
    for file in weight_files(folder):
        weights.update(_sample(file))
    text = json.dumps(shape, sort_keys=True).encode()
    return {
        "architecture": hashlib.sha256(text).hexdigest()[:16],
        "weights": weights.hexdigest()[:16],
    }


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    sample = str(size).encode()
    with file.open("rb") as opened:
        for start in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
            opened.seek(start)
            sample += opened.read(_SAMPLE_BYTES)
    return sample


def hold(folder: Path) -> None:
    """Hold `folder` until this process ends; the kernel lets go of it, however it ends.

    The file stays and says who holds it; children do not.

    Raises:
        ConfigError: another process holds it, which is named, or it cannot be written.
    """
    file = folder / LOCK_FILE
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"folder {str(folder)!r} cannot be locked: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise ConfigError(f"{str(file)!r} cannot be locked: {error}") from error
        raise ConfigError(
            f"folder {str(folder)!r} is in use by {_holder(file)}: end that process, or wait for it"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def holder_of(folder: Path) -> str:
    """The process that holds `folder`; empty: none does."""
    try:
        with (folder / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(folder / LOCK_FILE)
    except OSError:
        return ""
    return ""


def _holder(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() or "another process"
