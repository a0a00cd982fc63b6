"""Model folders that are refused: other kinds of models, and damaged or incomplete folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from bench.harness.byte_model import make_byte_model
from tests.suites.models.architectures import ARCHITECTURES

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A folder that no run can be started from."""

    name: str
    """Unique in the zoo."""
    problem: str
    """What the launcher says of it, before it exits with 78."""
    make: Callable[[Path], object]
    """Writes the folder."""


def _llama(folder: Path) -> None:
    ARCHITECTURES["llama-untied"].make(folder, 0)


def _bert(folder: Path) -> None:
    make_byte_model(folder)
    config = BertConfig(vocab_size=264, hidden_size=96, num_hidden_layers=2, num_attention_heads=4)
    BertForMaskedLM(config).save_pretrained(folder)


def _t5(folder: Path) -> None:
    make_byte_model(folder)
    config = T5Config(vocab_size=264, d_model=96, d_kv=24, d_ff=192, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def _as_bin(folder: Path) -> None:
    _llama(folder)
    torch.save(load_file(folder / _WEIGHTS), folder / "pytorch_model.bin")
    (folder / _WEIGHTS).unlink()


def _with_code(folder: Path) -> None:
    _llama(folder)
    _change_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (folder / "modeling.py").write_text("raise SystemExit('ran')\n", encoding="utf-8")


def _unknown(folder: Path) -> None:
    _llama(folder)
    _change_config(folder, model_type="unheard_of", architectures=["UnheardOfForCausalLM"])


def _change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")


def _without_tokenizer(folder: Path) -> None:
    _llama(folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _without_template(folder: Path) -> None:
    _llama(folder)
    (folder / "chat_template.jinja").unlink()


def _adapter(folder: Path) -> None:
    make_byte_model(folder)
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")


def _truncated(folder: Path) -> None:
    _llama(folder)
    content = (folder / _WEIGHTS).read_bytes()
    (folder / _WEIGHTS).write_bytes(content[: len(content) // 2])


def _quantized(folder: Path) -> None:
    _llama(folder)
    _change_config(folder, quantization_config={"quant_method": "fp8"})


def _more_tokens(folder: Path) -> None:
    _llama(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<tool-{number}>" for number in range(7)])
    tokenizer.save_pretrained(folder)


def _shard_missing(folder: Path) -> None:
    ARCHITECTURES["llama-bfloat16-shards"].make(folder, 0)
    min(folder.glob("*.safetensors")).unlink()


REFUSALS = {
    refusal.name: refusal
    for refusal in (
        Refusal(name="t5", problem="not a causal language model", make=_t5),
        Refusal(name="bert", problem="not a causal language model", make=_bert),
        Refusal(name="unknown-type", problem="config.json cannot be used", make=_unknown),
        Refusal(name="bin-weights", problem="pickle files", make=_as_bin),
        Refusal(name="custom-code", problem="needs code of its own", make=_with_code),
        Refusal(name="no-tokenizer", problem="has no tokenizer", make=_without_tokenizer),
        Refusal(name="no-chat-template", problem="has no chat template", make=_without_template),
        Refusal(name="adapter-alone", problem="is an adapter without its model", make=_adapter),
        Refusal(name="empty", problem="has no config.json", make=Path.mkdir),
        Refusal(name="truncated", problem="was cut short", make=_truncated),
        Refusal(name="quantized", problem="is quantized by fp8", make=_quantized),
        Refusal(name="more-tokens", problem="268 tokens, and its embedding", make=_more_tokens),
        Refusal(name="shard-missing", problem="which is not there", make=_shard_missing),
        *(
            Refusal(
                name=name,
                problem="has layers of type",
                make=lambda folder, name=name: ARCHITECTURES[name].make(folder, 0),  # type: ignore[misc]
            )
            for name in ("mamba", "mamba2", "qwen3-next", "lfm2")
        ),
    )
}
"""By name."""
