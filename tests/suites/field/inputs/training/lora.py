"""LoRA on many families: what gets an adapter, and that the merged model is the trainer's.

The right layers are those that torch says are linear; the right values are those of the trainer's
model with its adapters, and transformers' of the exported folder.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from bench.harness.byte_model import make_byte_model
from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import EngineRequest, PauseMode, Sampling
from rollout.server.engines.torch.torch_engine import TorchEngine
from rollout.server.weights.merge_lora import merge_lora
from tests.lib.trainer.support import trainer_config
from tests.suites.field.kind import Kind
from tests.suites.field.tiny_models import make_config, make_model
from trainer.checkpoint.model_folder import _weights
from trainer.config import TrainerConfig
from trainer.model.load_model import checkpoint_tensors
from trainer.model.lora import (
    adapter_settings,
    add_adapter,
    describe_layers,
    is_adapter,
    published_name,
)
from trainer.publish.weight_folder import write_folder

_TOLERANCE = 1e-5
_ENGINE_TOLERANCE = 1e-4
_MLP = ("gate_proj", "up_proj", "down_proj")
_MOE = {"num_hidden_layers": 3}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense llama": ("llama", {"tie_word_embeddings": True}),
    "dense qwen3": ("qwen3", {}),
    "dense qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "dense gemma3": ("gemma3_text", {}),
    "fused phi3": ("phi3", {}),
    "transposed gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "moe mixtral": ("mixtral", {}),
    "moe gpt_oss": ("gpt_oss", {}),
    "moe qwen3": ("qwen3_moe", {}),
    "moe granite": ("granitemoe", {}),
    "moe phi": ("phimoe", {}),
    "moe with dense layers qwen3": ("qwen3_moe", {**_MOE, "mlp_only_layers": [0]}),
    "moe with sparse steps qwen3": ("qwen3_moe", {**_MOE, "decoder_sparse_step": 2}),
    "shared experts qwen2": ("qwen2_moe", {**_MOE, "mlp_only_layers": [1]}),
    "shared experts deepseek": ("deepseek_v3", {**_MOE, "n_shared_experts": 2}),
    "shared experts glm4": ("glm4_moe", {**_MOE, "n_shared_experts": 1}),
}
"""Model type and settings."""
_DENSE = {  # MLPs that are no routed experts, whatever else there is
    "moe with dense layers qwen3": {f"model.layers.0.mlp.{name}" for name in _MLP},
    "moe with sparse steps qwen3": {
        f"model.layers.{n}.mlp.{name}" for n in (0, 2) for name in _MLP
    },
    "shared experts qwen2": {
        *(f"model.layers.1.mlp.{name}" for name in _MLP),
        *(f"model.layers.{n}.mlp.shared_expert.{name}" for n in (0, 2) for name in _MLP),
    },
    **{
        family: {
            *(f"model.layers.0.mlp.{name}" for name in _MLP),
            *(f"model.layers.{n}.mlp.shared_experts.{name}" for n in (1, 2) for name in _MLP),
        }
        for family in ("shared experts deepseek", "shared experts glm4")
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A run's settings."""

    family: str
    targets: tuple[str, ...] = ()
    rank: int = 2
    alpha: float = 0.0
    seed: int = 0


@cache
def _folder(family: str) -> Path:
    temporary = tempfile.TemporaryDirectory(prefix="seamflow-lora-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name)
    make_byte_model(folder)
    model_type, settings = FAMILIES[family]
    make_model(make_config(model_type, **settings)).save_pretrained(folder)  # type: ignore[operator]
    return folder


def _model(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@cache
def _base(family: str) -> Any:
    """Never changed."""
    return _model(_folder(family))


def _config(given: Lora, **settings: Any) -> TrainerConfig:
    return trainer_config(
        run_id="run",
        model=_folder(given.family),
        checkpoint__folder=Path("unused"),
        dtype="float32",
        lora__rank=given.rank,
        lora__alpha=given.alpha,
        lora__targets=given.targets,
        **settings,
    )


def _right_layers(given: Lora) -> set[str]:
    """Linear layers by torch, without routers; the output has the vocabulary's size."""
    layers = {
        name: layer
        for name, layer in _base(given.family).named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
    }
    if given.targets:
        return {name for name in layers if name.rpartition(".")[2] in given.targets}
    rows = {name: layer.weight.shape[0] for name, layer in layers.items()}
    return {name for name in layers if rows[name] != 264 and not name.endswith(".router")}


def _adapted(given: Lora) -> nn.Module:
    """The trainer's model; its adapters are no longer 0."""
    model: nn.Module = copy.deepcopy(_base(given.family))
    add_adapter(model, _config(given))
    torch.manual_seed(given.seed)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            nn.init.normal_(parameter, std=0.1)
    return model


def _check_layers(given: Lora) -> None:
    model = _adapted(given)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {name.partition(".lora_")[0] for name in trained}
    right = _right_layers(given)
    if found != right or not all(map(is_adapter, trained)):
        raise AssertionError(f"{describe_layers(found)} instead of {describe_layers(right)}")
    if not given.targets and not found >= _DENSE.get(given.family, set()):
        raise AssertionError(f"no adapter: {_DENSE[given.family] - found}")


def _check_export(given: Lora) -> None:
    """Export and both forms of publishing are transformers' model with the trainer's outputs."""
    base, model = _folder(given.family), _adapted(given)
    ids = torch.arange(48).view(2, 24) * 5
    with torch.no_grad():
        right = model(ids, use_cache=False).logits
    with tempfile.TemporaryDirectory(prefix="seamflow-lora-") as name:
        for folder in _written(given, model, Path(name)):
            with torch.no_grad():
                found = _model(folder)(ids, use_cache=False).logits
            if not (difference := (found - right).abs().max() / right.abs().max()) <= _TOLERANCE:
                raise AssertionError(f"{folder.name} differs by {difference:.2g}")
            _compare_frozen(base, folder, _right_layers(given))


def _written(given: Lora, model: nn.Module, out: Path) -> list[Path]:
    config = _config(given)
    trained = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    whole = dict(_weights(model, config, trained, Path("unused")))
    write_folder(out / "whole", config.model, checkpoint_tensors(model, whole), durable=False)
    if given.family.startswith("transposed"):
        return [out / "whole"]
    parts = {published_name(name): tensor for name, tensor in trained.items()}
    write_folder(out / "parts", config.model, parts, adapter_settings(config), durable=False)
    return [out / "whole", merge_lora(out / "parts", config.model)]


def _compare_frozen(base: Path, folder: Path, adapted: set[str]) -> None:
    """The same names, and what has no adapter is as it was."""
    before, after = _tensors(base), _tensors(folder)
    if missing := before.keys() ^ after.keys():
        raise AssertionError(f"{folder.name} differs in {sorted(missing)[:3]}")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if other := changed - {f"{name}.weight" for name in adapted}:
        raise AssertionError(f"{sorted(other)[:3]} changed")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


async def _check_engine(given: Lora) -> None:
    """An engine on the base takes the first published version, and samples by it."""
    model = _adapted(given)
    engine = TorchEngine(RolloutServerConfig(model=_folder(given.family), max_running=2))
    await engine.start()
    try:
        with tempfile.TemporaryDirectory(prefix="seamflow-lora-") as name:
            folders = await asyncio.to_thread(_written, given, model, Path(name))
            for version, folder in enumerate(folders, 1):
                await engine.pause(PauseMode.RETRACT)
                await engine.update_weights(folder, version)
                await engine.resume()
                await _sample(engine, model, given.seed)
    finally:
        await engine.close()


async def _sample(engine: TorchEngine, model: nn.Module, seed: int) -> None:
    ids, logprobs = list(range(7, 27)), list[float]()
    sampling = Sampling(max_new_tokens=6, ignore_eos=True, seed=seed)
    request = EngineRequest(request_id="row", token_ids=tuple(ids), sampling=sampling)
    async for chunk in engine.generate(request):
        ids += chunk.token_ids
        logprobs += chunk.logprobs
    with torch.no_grad():
        table = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    for place, logprob in enumerate(logprobs, len(ids) - len(logprobs)):
        if not abs(logprob - float(table[place - 1, ids[place]])) <= _ENGINE_TOLERANCE:
            raise AssertionError(f"token {place}: {logprob}, not {table[place - 1, ids[place]]}")


def _check_refused(given: Lora) -> None:
    """A target that is no layer: named, with the names that there are."""
    right = _right_layers(Lora(family=given.family))
    try:
        add_adapter(copy.deepcopy(_base(given.family)), _config(given))
    except ValueError as error:
        names = {name.rpartition(".")[2] for name in right}
        if not any(repr(each) in str(error) for each in given.targets):
            raise AssertionError(f"{error}") from error
        if not all(name in str(error) for name in names):
            raise AssertionError(f"{error} does not name {names}") from error
    else:
        raise AssertionError("was not refused")


_DEFAULTS = tuple(Lora(family=family) for family in FAMILIES)
_EXPORTED = tuple(
    Lora(family=family) for family in ("dense llama", "fused phi3", "moe mixtral", *sorted(_DENSE))
)


@st.composite
def _loras(draw: st.DrawFn) -> Lora:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    names = sorted({each.rpartition(".")[2] for each in _right_layers(Lora(family=family))})
    return Lora(
        family=family,
        targets=tuple(draw(st.lists(st.sampled_from(names), max_size=3, unique=True))),
        rank=draw(st.integers(1, 9)),
        alpha=draw(st.sampled_from((0.0, 1.0, 16.0))),
        seed=draw(st.integers(0, 99)),
    )


_WRONG = [
    Lora(family="dense llama", targets=("query",)),
    Lora(family="dense llama", targets=("q_proj", "vproj")),
    Lora(family="moe mixtral", targets=("w1",)),
    Lora(family="moe mixtral", targets=("experts",)),
    Lora(family="moe mixtral", targets=("gate_up_proj",)),
    Lora(family="moe gpt_oss", targets=("q_proj", "down_proj")),
    Lora(family="moe qwen3", targets=("gate_proj", "up_proj", "down_proj")),
    Lora(family="shared experts deepseek", targets=("experts.gate_proj",)),
    Lora(family="fused phi3", targets=("q_proj",)),
]

KINDS = (
    Kind(
        name="layers with an adapter",
        check=_check_layers,
        examples=_DEFAULTS,
        generated=_loras(),
        short=2,
        long=300,
    ),
    Kind(
        name="exported adapters",
        check=_check_export,
        examples=_EXPORTED,
        generated=_loras(),
        short=1,
        long=300,
    ),
    Kind(
        name="adapters in an engine",
        check=_check_engine,
        examples=_EXPORTED[2:5],
        generated=_loras(),
        short=1,
        long=150,
    ),
    Kind(name="targets that are no layers", check=_check_refused, examples=_WRONG),
)
