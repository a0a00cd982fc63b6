"""The Llama family's forward pass, written for rows of a paged cache: Llama, Mistral, Qwen2, Qwen3.

All tokens of a pass lie in one list, decoding rows first, then the parts of prompts: every linear
layer sees one matrix, and only attention (`paged_cache.PagedCache`) knows whose token is whose.

Shapes: N tokens, R decoding rows, E model size, H query heads, K key/value heads, D head size,
I inputs, O outputs, T positions, V vocabulary.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry their shapes in their names

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rollout.server.engines.torch.paged_cache import PagedCache, Plan
from rollout.server.engines.torch.row_model import Step
from rollout.server.engines.torch.weight_reader import (
    CheckedTensors,
    Storages,
    read_folder,
)

# Below this, calling oneDNN costs more than packing saves.
_SMALLEST_PACKED = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """`x @ weight.T + bias`, with what a transformer does next done by the same kernel.

    On the CPU its weight is kept in oneDNN's own packed order, packed once per weight version: the
    plain kernel packs it anew in each call, which for tens of rows costs as much as the product.
    Measured against `torch.nn.functional.linear` at 64 rows: 1.3 to 1.5 times as fast.
    Shapes: N tokens, I inputs, O outputs.
    """

    weight_OI: Tensor
    """Plain, or packed by oneDNN."""
    bias_O: Tensor | None
    """None adds nothing."""
    packed: bool
    """Whether only oneDNN can read `weight_OI`."""

    @classmethod
    def of(cls, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        """Pack a weight if this machine gains by it."""
        packed = (
            torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and weight_OI.device.type == "cpu"
            and weight_OI.dtype == torch.float32
            and weight_OI.numel() >= _SMALLEST_PACKED
        )
        if packed:
            weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
        return cls(weight_OI=weight_OI.contiguous(), bias_O=bias_O, packed=packed)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return [N, O]."""
        return self._unary(x_NI, "none") if self.packed else self._plain(x_NI)

    def silu(self, x_NI: Tensor) -> Tensor:
        """Return silu of it, [N, O]."""
        return self._unary(x_NI, "swish") if self.packed else functional.silu(self._plain(x_NI))

    def plus(self, x_NI: Tensor, other_NO: Tensor) -> Tensor:
        """Return the sum with `other_NO`."""
        return self._binary(x_NI, other_NO, "add") if self.packed else self._plain(x_NI) + other_NO

    def times(self, x_NI: Tensor, other_NO: Tensor) -> Tensor:
        """Return the product with `other_NO`, element by element."""
        return self._binary(x_NI, other_NO, "mul") if self.packed else self._plain(x_NI) * other_NO

    def _plain(self, x_NI: Tensor) -> Tensor:
        return functional.linear(x_NI, self.weight_OI, self.bias_O)

    def _unary(self, x_NI: Tensor, then: str) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x_NI, self.weight_OI, self.bias_O, then, [], ""
        )
        return result

    def _binary(self, x_NI: Tensor, other_NO: Tensor, then: str) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x_NI, other_NO, self.weight_OI, self.bias_O, then
        )
        return result

    @property
    def nbytes(self) -> int:
        bias = 0 if self.bias_O is None else self.bias_O.nbytes
        return self.weight_OI.numel() * self.weight_OI.element_size() + bias


_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def is_llama(config: Any) -> bool:
    """Whether a Hugging Face configuration names a model this file computes."""
    return config.model_type in _FAMILY and config.hidden_act in ("silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The numbers of a configuration that the forward pass needs."""

    layers: int
    heads: int
    """H."""
    kv_heads: int
    """K."""
    head_size: int
    """D."""
    epsilon: float
    """Of every norm."""

    @classmethod
    def of(cls, config: Any) -> LlamaShape:
        """Read them from a Hugging Face configuration."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            epsilon=config.rms_norm_eps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    norm_E: Tensor
    query_key_value: Linear
    query_norm_HD: Tensor | None
    """Norm weights of all query heads, then of all key heads; None where there is no such norm."""
    output: Linear
    mlp_norm_E: Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """One version of the weights, in the form the forward pass reads."""

    embedding_VE: Tensor
    layers: list[_Layer]
    norm_E: Tensor
    head: Linear

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        shape: LlamaShape,
        arranged: Mapping[int, _Layer] = MappingProxyType({}),
    ) -> LlamaWeights:
        """Arrange tensors, by their Hugging Face names, but those of `arranged` layers."""
        embedding = tensors["model.embed_tokens.weight"]
        layers = range(shape.layers)
        return cls(
            embedding_VE=embedding,
            layers=[arranged.get(i) or _layer(tensors, _prefix(i), shape) for i in layers],
            norm_E=tensors["model.norm.weight"],
            head=Linear.of(tensors.get("lm_head.weight", embedding), None),
        )

    @property
    def nbytes(self) -> int:
        linears = [self.head]
        tensors = [self.embedding_VE, self.norm_E]
        for layer in self.layers:
            linears += [layer.query_key_value, layer.output, layer.gate, layer.up, layer.down]
            tensors += [layer.norm_E, layer.mlp_norm_E]
        return sum(linear.nbytes for linear in linears) + sum(tensor.nbytes for tensor in tensors)


class LlamaReader:
    """A `WeightReader` that arranges each layer as soon as it is read: none is held twice."""

    def __init__(
        self, names: Storages, shape: LlamaShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tensors = CheckedTensors(names, dtype)
        self._shape, self._device = shape, device
        self._layers: dict[int, _Layer] = {}
        uses = Counter(storage.number for storage in names.values())
        prefixes = [_prefix(number) for number in range(shape.layers)]
        members = [{name for name in names if name.startswith(prefix)} for prefix in prefixes]
        # A tied tensor may have to stand for others too.
        self._untied = {
            number: layer
            for number, layer in enumerate(members)
            if all(uses[names[name].number] == 1 for name in layer)
        }

    def add(self, file: Path) -> None:
        """Read a file, and arrange the layers that are complete by it."""
        held = self._tensors.held
        with torch.inference_mode():
            self._tensors.add(file)
            for number, names in self._untied.items():
                if number not in self._layers and names <= held.keys():
                    mine = self._placed({name: held.pop(name) for name in names})
                    self._layers[number] = _layer(mine, _prefix(number), self._shape)

    def complete(self, folder: Path) -> LlamaWeights:
        """Arrange the rest."""
        with torch.inference_mode():
            rest = self._placed(self._tensors.complete(folder))
            return LlamaWeights.of(rest, self._shape, self._layers)

    def _placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}


def _prefix(number: int) -> str:
    return f"model.layers.{number}."


def _layer(tensors: Mapping[str, Tensor], prefix: str, shape: LlamaShape) -> _Layer:
    def linear(name: str) -> Linear:
        return Linear.of(tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias"))

    def joined(kind: str) -> Tensor:
        query, key, value = (tensors[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv")
        size = shape.head_size
        return torch.cat([_in_pairs(query, size), _in_pairs(key, size), value])

    biased = f"{prefix}self_attn.q_proj.bias" in tensors
    return _Layer(
        norm_E=tensors[f"{prefix}input_layernorm.weight"],
        query_key_value=Linear.of(joined("weight"), joined("bias") if biased else None),
        query_norm_HD=_query_norm(tensors, prefix, shape),
        output=linear("self_attn.o_proj"),
        mlp_norm_E=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def _query_norm(tensors: Mapping[str, Tensor], prefix: str, shape: LlamaShape) -> Tensor | None:
    query = tensors.get(f"{prefix}self_attn.q_norm.weight")
    if query is None:
        return None
    key = tensors[f"{prefix}self_attn.k_norm.weight"]
    query, key = _in_pairs(query, shape.head_size), _in_pairs(key, shape.head_size)
    return torch.cat([query.expand(shape.heads, -1), key.expand(shape.kv_heads, -1)])


def _in_pairs(weight_OI: Tensor, head_size: int) -> Tensor:
    """Reorder every head's outputs from halves (0, D/2, ...) to pairs, as rotation reads them.

    Queries and keys are reordered alike, so their products stay what they are.
    """
    halves = weight_OI.view(-1, 2, head_size // 2, *weight_OI.shape[1:])
    return halves.transpose(1, 2).flatten(0, 2)


class LlamaModel:
    """A `RowModel` of the Llama family."""

    supports_mixed_batches = True

    def __init__(self, model: Any, storages: Storages, max_context: int) -> None:
        """Take weights and rotations over from a Hugging Face model."""
        self._shape = LlamaShape.of(model.config.get_text_config(decoder=True))
        self._storages = storages
        self._dtype, self._device = model.dtype, model.device
        self._rotation_TD = _rotation(model, max_context)
        self._weights: LlamaWeights | None = LlamaWeights.of(model.state_dict(), self._shape)
        self._cache = PagedCache(
            layers=self._shape.layers,
            heads=self._shape.heads,
            kv_heads=self._shape.kv_heads,
            head_size=self._shape.head_size,
            dtype=self._dtype,
            device=self._device,
        )
        self.read, self.write, self.free = self._cache.read, self._cache.write, self._cache.free

    def rotation(self, length: int) -> int:
        """One for all lengths."""
        return 0

    def forward(self, step: Step) -> Tensor | None:
        weights = self._weights
        assert weights is not None, "memory is released"
        tokens_N, positions_N = self._inputs(step)
        plan = self._cache.plan(step)
        rotation_N1D = self._rotation_TD[positions_N][:, None]
        x_NE = weights.embedding_VE[tokens_N]
        for number, layer in enumerate(weights.layers):
            x_NE = self._attention(number, layer, x_NE, rotation_N1D, plan)
            y_NE = self._norm(x_NE, layer.mlp_norm_E)
            x_NE = layer.down.plus(layer.up.times(y_NE, layer.gate.silu(y_NE)), x_NE)
        if not plan.rows:
            return None
        return weights.head(self._norm(x_NE[: plan.rows], weights.norm_E))

    def _inputs(self, step: Step) -> tuple[Tensor, Tensor]:
        """Every token and its position: rows, parts."""
        if not step.parts:
            return step.tokens_R, step.positions_R
        tokens = [token for part in step.parts for token in part.token_ids]
        places = [place for part in step.parts for place in range(part.start, part.end)]
        extra = torch.tensor([tokens, places], dtype=torch.int64, device=self._device)
        return torch.cat([step.tokens_R, extra[0]]), torch.cat([step.positions_R, extra[1]])

    def _attention(
        self, number: int, layer: _Layer, x_NE: Tensor, rotation_N1D: Tensor, plan: Plan
    ) -> Tensor:
        shape = self._shape
        rotated = shape.heads + shape.kv_heads
        joined_NE = layer.query_key_value(self._norm(x_NE, layer.norm_E))
        joined_NHD = joined_NE.view(len(x_NE), rotated + shape.kv_heads, shape.head_size)
        turned_NHD = joined_NHD[:, :rotated]
        if layer.query_norm_HD is not None:
            turned_NHD = self._norm(turned_NHD, layer.query_norm_HD)
        turned_NHD = _rotate(turned_NHD, rotation_N1D)
        self._cache.store(number, plan, turned_NHD[:, shape.heads :], joined_NHD[:, rotated:])
        found_NE = x_NE.new_empty(len(x_NE), shape.heads * shape.head_size)
        self._cache.attend(number, plan, turned_NHD[:, : shape.heads], found_NE)
        return layer.output.plus(found_NE, x_NE)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm over the last axis, in float32."""
        if x.dtype == torch.float32:
            # Fewer passes over memory than torch's own on the CPU.
            scale = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(self._shape.epsilon).rsqrt_()
            normed: Tensor = (x * scale[..., None]).mul_(weight)
            return normed
        wide = functional.rms_norm(x.float(), (x.shape[-1],), eps=self._shape.epsilon)
        return wide.to(x.dtype) * weight

    def experts(self, slot: int, start: int, stop: int) -> None:
        """There are none."""

    def reader(self) -> LlamaReader:
        return LlamaReader(self._storages, self._shape, self._dtype, self._device)

    def read_weights(self, folder: Path) -> LlamaWeights:
        return read_folder(self.reader(), folder)  # type: ignore[no-any-return]

    def use_weights(self, weights: LlamaWeights) -> None:
        self._weights = weights

    def release(self) -> int:
        freed = self._cache.nbytes + (self._weights.nbytes if self._weights else 0)
        self._cache.clear()
        self._weights = None
        return freed


def _rotation(model: Any, max_context: int) -> Tensor:
    """Return the rotation of every position as complex numbers, [T, D / 2]."""
    positions_1T = torch.arange(max_context, device=model.device)[None]
    like = torch.empty(0, dtype=torch.float32, device=model.device)
    cosine_1TD, sine_1TD = model.model.rotary_emb(like, positions_1T)
    half = cosine_1TD.shape[-1] // 2
    return torch.complex(cosine_1TD[0, :, :half], sine_1TD[0, :, :half])


def _rotate(x_NHD: Tensor, rotation_N1D: Tensor) -> Tensor:
    """Turn every pair of numbers by its position's angle."""
    pairs = torch.view_as_complex(x_NHD.float().view(*x_NHD.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation_N1D).flatten(-2).to(x_NHD.dtype)
