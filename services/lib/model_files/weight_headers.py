"""Names, shapes and types of a folder's weights, from the headers of its safetensors files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from services.lib.model_files.json_file import read_object

_PIECE_BYTES = 1 << 22

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # of the safetensors format


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file says of one of its tensors."""

    dtype: str
    """As safetensors names it, such as BF16."""
    shape: tuple[int, ...]
    file: Path
    begin: int
    """Place in the file of its first byte."""
    num_bytes: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files, all that the index names.

    Raises:
        ValueError: one or all are missing; names the folder and the cure.
    """
    if not (folder / _INDEX).is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ValueError(f"model {folder}: {_without_weights(folder)}")
        return found
    shards = sorted(set(read_object(folder, _INDEX).get("weight_map", {}).values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing or not shards:
        raise ValueError(
            f"model {folder}: {_INDEX} names {', '.join(missing) or 'no file'}, which is not "
            "there; copy the whole folder"
        )
    return [folder / name for name in shards]


def read_headers(folder: Path) -> dict[str, Header]:
    """Every tensor of the folder by its name.

    Raises:
        ValueError: a file is missing, damaged or cut short, or lacks a tensor that the index says
            it has; names the folder, the file and the cure.
    """
    tensors: dict[str, Header] = {}
    for file in weight_files(folder):
        tensors |= _read(folder, file)
    expected = read_object(folder, _INDEX).get("weight_map", {})
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(
            f"model {folder}: {expected[missing[0]]} does not hold {missing[0]}, which {_INDEX} "
            f"says it does ({len(missing)} such tensors); copy the whole folder again"
        )
    return tensors


def same_content(one: Header, other: Header) -> bool:
    """Whether two tensors are the same, byte by byte."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        for done in range(0, one.num_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, one.num_bytes - done)
            if first.read(size) != second.read(size):
                return False
    return True


def _read(folder: Path, file: Path) -> dict[str, Header]:
    """Read a header, and compare the file's size with what it promises."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(min(length, _MAX_HEADER_BYTES)))
            entries = {name: each for name, each in header.items() if name[:2] != "__"}
            ends = [each["data_offsets"][1] for each in entries.values()]
            found = {
                name: Header(
                    dtype=each["dtype"],
                    shape=tuple(each["shape"]),
                    file=file,
                    begin=8 + length + each["data_offsets"][0],
                    num_bytes=each["data_offsets"][1] - each["data_offsets"][0],
                )
                for name, each in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ValueError(
                f"model {folder}: {file.name} is not a safetensors file, or damaged; copy it again"
            ) from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ValueError(
            f"model {folder}: {file.name} has {size} bytes and should have {expected}; the copy "
            "was cut short, so copy it again"
        )
    return found


def _without_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return (
            "has its weights in pickle files (.bin), which may run code; convert it with "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    return "has no weights (*.safetensors); save them with model.save_pretrained()"
