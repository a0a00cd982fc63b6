"""Weights of a model folder, checked against the model before any change."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout.server.engines.engine import WeightsError
from services.lib.transformer.load_causal import dequantized


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of `folder`. Raises `WeightsError` if one or all are missing."""
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder")
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{folder}: no *.safetensors file")
        return files
    files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    for file in files:
        if not file.exists():
            raise WeightsError(f"{folder}: {index.name} names {file.name}, which is missing")
    return files


@dataclass(frozen=True, slots=True)
class Storage:
    """What a name of a model's state dict stands for; tied names stand for the same."""

    number: int
    """Equal for names that share their memory."""
    shape: torch.Size


Storages = Mapping[str, Storage]


def storages(state: Mapping[str, Tensor]) -> Storages:
    """Describe a state dict, so that checkpoints can be checked once it is gone."""
    return {name: Storage(tensor.data_ptr(), tensor.shape) for name, tensor in state.items()}


class WeightReader(Protocol):
    """Reads one version, file by file; a file or version that is refused raises `WeightsError`."""

    def add(self, file: Path) -> None:
        """Read a file; of one that is refused nothing is kept."""
        ...

    def complete(self, folder: Path) -> Any:
        """What a model can use, once all files of `folder` are read."""
        ...


def read_folder(reader: WeightReader, folder: Path) -> Any:
    """Read all files of `folder`. Raises `WeightsError`."""
    for file in weight_files(folder):
        reader.add(file)
    return reader.complete(folder)


class CheckedTensors:
    """A `WeightReader` that checks names, shapes and numbers, and gives every name its tensor.

    Tied names count as one, and any of them may be given.
    """

    def __init__(self, expected: Storages, dtype: torch.dtype) -> None:
        """`expected` are the model's names; tensors are converted to `dtype`."""
        self.held: dict[str, Tensor] = {}
        """What is read; who takes a tensor out has it for itself."""
        self._expected, self._dtype = expected, dtype
        self._given: set[Storage] = set()

    def add(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
                self._check_names(file, names)
                read = {name: self._checked(file, name, opened.get_tensor(name)) for name in names}
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: {error}") from error
        self.held.update(read)
        self._given.update(self._expected[name] for name in read)

    def complete(self, folder: Path) -> dict[str, Tensor]:
        """Every name of the model with its tensor, but for those that were taken out."""
        expected = self._expected
        if missing := sorted(name for name, one in expected.items() if one not in self._given):
            raise WeightsError(f"{folder}: has no {_some(missing)}")
        by_storage = {expected[name]: tensor for name, tensor in self.held.items()}
        return {n: by_storage[one] for n, one in expected.items() if one in by_storage}

    def _check_names(self, file: Path, names: list[str]) -> None:
        if unexpected := sorted(set(names) - self._expected.keys()):
            raise WeightsError(f"{file}: the model has no {_some(unexpected)}")

    def _checked(self, file: Path, name: str, tensor: Tensor) -> Tensor:
        expected = self._expected[name]
        if tensor.shape != expected.shape:
            shapes = f"{list(tensor.shape)}, the model's is {list(expected.shape)}"
            raise WeightsError(f"{file}: {name} has shape {shapes}")
        if not is_finite(tensor):
            raise WeightsError(f"{file}: {name} has infinite or NaN values")
        return tensor.to(self._dtype)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no infinite and no NaN value.

    Its extremes tell, as one NaN makes both NaN: on the CPU twenty times as fast as `isfinite`, and
    without a copy.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(extreme.isfinite() for extreme in tensor.aminmax())


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


_Identity = tuple[int, int, int, int]
"""Device, inode, size and time of change: a file that is moved keeps them."""


class ArrivingWeights:
    """At most one version, which nothing uses before `take` has found all its files the same.

    Host memory: the weights, and the tensors of layers that are not complete, which are those of
    two files at most where layers follow each other. Thread-safe; all calls block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: WeightReader | None = None
        self._files: dict[str, _Identity] = {}

    def add(self, begin: Callable[[], WeightReader], files: Sequence[Path]) -> None:
        """Read what is new of `files`, which are all files so far of the next version.

        Begins again if those that were read are not among them. A file that has been moved away is
        left to `take`. Raises `WeightsError`, after which nothing is held.
        """
        with self._lock, suppress(FileNotFoundError):
            if not self._are_among(files):
                self._clear()
            self._reader = self._reader or begin()
            try:
                self._add(self._reader, files)
            except WeightsError:
                self._clear()
                raise

    def take(self, folder: Path) -> Any | None:
        """All of `folder`, its other files read now; None if nothing of it could be read before."""
        with self._lock:
            try:
                files = weight_files(folder)
                if self._reader is None or not self._are_among(files):
                    return None
                self._add(self._reader, files)
                return self._reader.complete(folder)
            except (WeightsError, OSError):
                return None  # who reads it from its beginning can say what is wrong, if anything is
            finally:
                self._clear()

    def clear(self) -> None:
        """Free the memory."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._reader, self._files = None, {}

    def _add(self, reader: WeightReader, files: Sequence[Path]) -> None:
        for file in files:
            identity = _identity(file)
            if self._files.get(file.name) != identity:
                reader.add(file)
                self._files[file.name] = identity

    def _are_among(self, files: Sequence[Path]) -> bool:
        given = {file.name: _identity(file) for file in files}
        return self._files.items() <= given.items()


def _identity(file: Path) -> _Identity:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


_LOADING = threading.Lock()
"""Held while transformers loads a model, which changes state that all threads share."""


def has_module_names(folder: Path, expected: Storages) -> bool:
    """Whether a checkpoint has the names of the model's state dict, or all of them and more.

    A Mixtral's experts are three tensors each in its checkpoint, and one parameter of its modules.
    Raises `WeightsError`: a file cannot be read.
    """
    names: set[str] = set()
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: {error}") from error
    given = {storage for name, storage in expected.items() if name in names}
    return names <= expected.keys() or given == set(expected.values())


def load_converted(folder: Path, expected: Storages, dtype: torch.dtype) -> dict[str, Tensor]:
    """As `CheckedTensors`, through transformers. Raises `WeightsError`."""
    weight_files(folder)
    with _LOADING:
        state, missing, unexpected = _load(folder)
    if missing:
        raise WeightsError(f"{folder}: has no {', '.join(sorted(missing)[:3])}")
    if unexpected:
        raise WeightsError(f"{folder}: the model has no {', '.join(sorted(unexpected)[:3])}")
    for name, tensor in state.items():
        if name not in expected or tensor.shape != expected[name].shape:
            raise WeightsError(f"{folder}: {name} is not of this model, or has another shape")
        if not is_finite(tensor):
            raise WeightsError(f"{folder}: {name} has infinite or NaN values")
    return {name: _as(tensor, dtype) for name, tensor in state.items()}


def _load(folder: Path) -> tuple[dict[str, Tensor], set[str], set[str]]:
    """The state dict, the names that the folder lacks, and those that the model lacks."""
    try:
        # float32, which is the default: for any other type transformers changes the default of all
        # threads while it loads.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **dequantized(folder),
        )
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
        raise WeightsError(f"{folder}: {' '.join(str(error).split())}") from error
    model, found = loaded
    return model.state_dict(), set(found["missing_keys"]), set(found["unexpected_keys"])


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
