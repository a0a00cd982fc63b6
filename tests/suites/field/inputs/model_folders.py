"""Folders that cannot be trained: refused before the start, by everything that reads one.

Whoever reads a folder says the same line: the launcher's check, `--dry-run`, engine and trainer.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from bench.harness.byte_model import make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.server.config import RolloutServerConfig
from rollout.server.engines.torch.torch_engine import TorchEngine
from rollout.server.engines.torch.transformers_model import load_model
from services.chassis.errors import ConfigError
from services.lib.model_files.model_folder import check_model_folder
from services.lib.transformer.load_causal import load_causal
from tests.suites.field.kind import Kind
from tests.suites.field.tiny_models import make_config, make_model
from trainer.publish.weight_folder import write_folder

_TOKENS = 261
"""Of the byte tokenizer."""
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FAMILIES = ("llama", "qwen3", "gpt2", "gpt_neox", "gemma2", "mixtral")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Rows of the embedding and tokens of the tokenizer."""

    family: str = "llama"
    rows: int
    added: int
    """Tokens added to those of the byte tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """What a quantized folder says of itself."""

    settings: dict[str, Any] = field(default_factory=dict)
    method: str
    """How it is named."""
    place: str = "config.json"
    """File, or "text_config" in config.json, or "weights" for their type alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A folder whose files do not belong together."""

    name: str
    number: int = 0
    """Which tensor, or file."""


@cache
def _whole(family: str, rows: int) -> Path:
    temporary = tempfile.TemporaryDirectory(prefix="seamflow-folder-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name) / "model"
    make_byte_model(folder)
    model: Any = make_model(make_config(family, vocab_size=rows, tie_word_embeddings=False))
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


@contextmanager
def _copied(family: str = "llama", rows: int = 264) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="seamflow-folder-") as name:
        yield Path(shutil.copytree(_whole(family, rows), Path(name) / "model"))


def _edit(file: Path, **changes: Any) -> None:
    found = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(found | changes))


def _refusals(folder: Path, *, weights: bool = True) -> dict[str, str]:
    """What each reader of a folder says of it."""
    readers: dict[str, Callable[[], object]] = {
        "check": lambda: check_model_folder(folder),
        "trainer": lambda: load_causal(folder, torch.float32),
        "engine": lambda: TorchEngine(RolloutServerConfig(model=folder)) and load_model(folder, 1),
    }
    if not weights:
        readers["gateway"] = lambda: ChatTemplate(folder)
    found = {}
    for name, read in readers.items():
        try:
            read()
        except (ValueError, ConfigError) as error:
            found[name] = str(error)
        else:
            found[name] = ""
    return found


def _expect(found: dict[str, str], *parts: str) -> None:
    """Each says these parts in one line; none: nobody refuses."""
    for name, line in found.items():
        wrong = [part for part in parts if part not in line] if parts else [line] if line else []
        if wrong or "\n" in line:
            raise AssertionError(f"{name} says {line!r}, without {wrong}")


def _check_sizes(given: Sizes) -> None:
    with _copied(given.family, given.rows) as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens([f"<tool-{number}>" for number in range(given.added)])
        tokenizer.save_pretrained(folder)
        parts = (str(folder), f"{_TOKENS + given.added} tokens", f"{given.rows} rows", "resize")
        fits = _TOKENS + given.added <= given.rows
        _expect(_refusals(folder, weights=False), *(() if fits else parts))


def _check_quantized(given: Quantized) -> None:
    with _copied() as folder:
        if given.place == "config.json":
            _edit(folder / given.place, quantization_config=given.settings)
        elif given.place == "text_config":
            _edit(folder / "config.json", text_config={"quantization_config": given.settings})
        elif given.place == "weights":
            _quantize(folder, getattr(torch, given.method.lower()))
        else:
            _edit(folder / given.place, **given.settings)
        shown = {"float8_e4m3fn": "F8_E4M3", "uint8": "U8"}.get(given.method, given.method)
        _expect(_refusals(folder), str(folder), shown, "cannot be trained", "bfloat16")
        _check_written(folder)


def _quantize(folder: Path, dtype: torch.dtype) -> None:
    """Give a weight of a layer another type, as a folder without any entry has it."""
    weights = json.loads((folder / _INDEX).read_text())["weight_map"]
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(folder / weights[name])
    save_file(tensors | {name: tensors[name].to(dtype)}, folder / weights[name])


def _check_written(folder: Path) -> None:
    """A folder of full weights does not keep what its base said of quantized ones."""
    out = folder.parent / "published"
    write_folder(out, folder, {"a": torch.zeros(2, dtype=torch.bfloat16)}, durable=False)
    config = json.loads((out / "config.json").read_text())
    kept = [each for each in (config, config.get("text_config") or {}) if _entries(each)]
    files = [each.name for each in out.glob("*quant*")]
    if kept or files or config.get("dtype", config.get("torch_dtype")) != "bfloat16":
        raise AssertionError(f"published: {kept} {files}")


def _entries(config: dict[str, Any]) -> list[str]:
    return [name for name in config if "quant" in name or "compression" in name]


def _check_damage(given: Damage) -> None:
    with _copied() as folder:
        index = json.loads((folder / _INDEX).read_text())["weight_map"]
        name = sorted(index)[given.number % len(index)]
        file = folder / index[name]
        if given.name == "shard":
            file.unlink()
            _expect(_refusals(folder), str(folder), file.name, "not there")
        elif given.name == "tensor":
            tensors = load_file(file)
            del tensors[name]
            save_file(tensors or {"other": torch.zeros(1)}, file)
            _expect(_refusals(folder), str(folder), file.name, name)
        elif given.name == "vocab_size":
            size = 264 + 8 * (1 + given.number % 5)
            _edit(folder / "config.json", vocab_size=size)
            _expect(_refusals(folder), str(folder), str(size), "264 rows")
        else:
            with file.open("rb+") as opened:
                opened.truncate(file.stat().st_size - 1 - given.number)
            _expect(_refusals(folder), str(folder), file.name, "cut short")


def _check_incomplete(given: Damage) -> None:
    """Without an index nothing but the model itself knows what is missing."""
    with _copied() as folder:
        tensors: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            tensors |= load_file(file)
            file.unlink()
        (folder / _INDEX).unlink()
        del tensors[name := sorted(tensors)[given.number % len(tensors)]]
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
        found = _refusals(folder)
        _expect({who: line for who, line in found.items() if who != "check"}, str(folder), name)


_METHODS = (
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "awq", "bits": 4, "version": "gemm"},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    {"quant_method": "torchao", "quant_type": "int4_weight_only"},
    {"quant_method": "hqq", "nbits": 4},
    {"quant_method": "quanto", "weights": "int8"},
    {"quant_method": "aqlm", "nbits_per_codebook": 16},
    {"quant_method": "eetq", "weights": "int8"},
    {"quant_method": "vptq"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
)
_QUANTIZED = [
    Quantized(settings=dict(settings), method=str(settings["quant_method"]), place=place)
    for settings in _METHODS
    for place in ("config.json", "text_config")
]
_OTHER_PLACES = [
    Quantized(settings={"load_in_8bit": True}, method="bitsandbytes"),
    Quantized(settings={"bits": 4}, method="does not name"),
    Quantized(settings={"bits": 4}, method="quantize_config.json", place="quantize_config.json"),
    Quantized(settings={"w_bit": 4}, method="quant_config.json", place="quant_config.json"),
    Quantized(
        settings={"quantization": {"quant_algo": "FP8"}}, method="FP8", place="hf_quant_config.json"
    ),
    Quantized(method="float8_e4m3fn", place="weights"),
    Quantized(method="uint8", place="weights"),
]
_DAMAGES = st.builds(
    Damage,
    name=st.sampled_from(("shard", "tensor", "vocab_size", "short")),
    number=st.integers(0, 40),
)

KINDS = (
    Kind(
        name="sizes of tokenizer and embedding",
        check=_check_sizes,
        examples=(
            Sizes(rows=258, added=7),
            Sizes(rows=264, added=3),
            Sizes(rows=264, added=4),
            *(Sizes(family=family, rows=320, added=60) for family in _FAMILIES),
        ),
        generated=st.builds(
            Sizes,
            family=st.sampled_from(_FAMILIES),
            rows=st.sampled_from((258, 261, 264, 272, 320)),
            added=st.integers(0, 64),
        ),
        short=3,
        long=150,
    ),
    Kind(
        name="quantized folders",
        check=_check_quantized,
        examples=(*_QUANTIZED, *_OTHER_PLACES),
    ),
    Kind(
        name="files that do not belong together",
        check=_check_damage,
        examples=[Damage(name=name) for name in ("shard", "tensor", "vocab_size", "short")],
        generated=_DAMAGES,
        long=150,
    ),
    Kind(
        name="weights that the model lacks",
        check=_check_incomplete,
        examples=(Damage(name="incomplete"),),
        generated=st.builds(Damage, name=st.just("incomplete"), number=st.integers(0, 40)),
        short=5,
        long=40,
    ),
)
