"""Whether a folder's weights are quantized, and what remains to be said of it without them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.lib.model_files.json_file import read_object
from services.lib.model_files.weight_headers import Header

QUANTIZATION_FILES = frozenset(
    {"quantize_config.json", "quant_config.json", "hf_quant_config.json"}
)
"""Of GPTQ, AWQ and ModelOpt: about weights that are not these."""
_ENTRIES = frozenset({"quantization_config", "quantization", "compression_config"})
_WIDE = frozenset({"F16", "BF16", "F32", "F64"})
_MXFP4 = ("_blocks", "_scales")
_WEIGHTS = ("weight", "weight_packed", "qweight", "_blocks")


def check_not_quantized(
    folder: Path, config: Mapping[str, Any], headers: Mapping[str, Header]
) -> None:
    """Check that weights are numbers that can be trained, or experts of gpt-oss in mxfp4.

    Raises:
        ValueError: one line that names the folder, the method and the cure.
    """
    mxfp4 = is_mxfp4(config)
    method = None if mxfp4 else _method(folder, config)
    narrow = (
        f"{each.dtype} weights ({name})"
        for name, each in headers.items()
        if not (mxfp4 and each.dtype == "U8" and name.endswith(_MXFP4))
        and each.dtype not in _WIDE
        and (name.endswith(_WEIGHTS) or each.dtype.startswith("F"))
    )
    if (method := method or next(narrow, None)) is not None:
        raise ValueError(
            f"model {folder}: is quantized by {method}, and quantized weights cannot be trained; "
            "use the folder that it was made from, or write one in bfloat16: load it where the "
            "method runs, model.dequantize(), model.save_pretrained()"
        )


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a gpt-oss whose experts are mxfp4, which can be read."""
    settings = config.get("quantization_config")
    is_named = isinstance(settings, Mapping) and settings.get("quant_method") == "mxfp4"
    return is_named and config.get("model_type") == "gpt_oss"


def _method(folder: Path, config: Mapping[str, Any]) -> str | None:
    for settings in (config, config.get("text_config") or {}):
        for entry in _ENTRIES & settings.keys():
            if found := settings[entry]:
                return _named(found)
    for name in sorted(QUANTIZATION_FILES):
        if found := read_object(folder, name):
            return f"{_named(found.get('quantization') or found)} ({name})"
    return None


def _named(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return str(settings)
    for name in ("quant_method", "quant_algo", "format"):
        if settings.get(name):
            return str(settings[name])
    on = [name for name in ("load_in_4bit", "load_in_8bit") if settings.get(name)]
    return f"bitsandbytes ({on[0]})" if on else f"a method that it does not name ({settings})"


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as that of weights that are not quantized."""
    kept = {name: value for name, value in config.items() if name not in _ENTRIES}
    if isinstance(kept.get("text_config"), Mapping):
        kept["text_config"] = without_quantization(kept["text_config"])
    return kept
