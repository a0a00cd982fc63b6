"""What tells two models apart without reading all of their weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from services.lib.model_files.json_file import read_object
from services.lib.model_files.weight_headers import weight_files

_SAMPLE_BYTES = 1 << 20
_NO_SHAPE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


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
