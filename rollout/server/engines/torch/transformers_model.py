"""Load a Hugging Face causal language model, and run it on cache slots.

Any architecture runs through its own transformers modules (`TransformersModel`). The Llama family,
which most are, has a faster implementation (`llama.LlamaModel`), used if it computes the same.

Shapes: R rows of a pass, S new tokens of each, T positions, V vocabulary.
"""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

import functools
import inspect
import sys
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.server.engines.torch.llama import LlamaModel, is_llama
from rollout.server.engines.torch.row_model import Part, RowModel, Step, longest_row, step_of
from rollout.server.engines.torch.slot_cache import ExpertSlots, SlotCache
from rollout.server.engines.torch.weight_reader import (
    CheckedTensors,
    Storages,
    has_module_names,
    load_converted,
    read_folder,
    storages,
)
from services.chassis.log import get_logger
from services.lib.model_files.end_ids import end_ids
from services.lib.model_files.json_file import check_layers, read_text_config
from services.lib.model_files.model_folder import check_model_folder
from services.lib.routed_experts import RoutingShape
from services.lib.transformer.load_causal import load_causal
from services.lib.transformer.routers import prepare_routers, recording
from services.lib.transformer.row_rope import row_rope

_PROMPT = 16
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model and its constants."""

    rows: RowModel
    max_context: int
    vocab_size: int
    """V."""
    eos_token_ids: tuple[int, ...]
    changes_rotation: bool
    """Whether the keys of a sequence are rotated otherwise as it grows (`RowModel.rotation`)."""
    device: torch.device
    """Where the columns of a batch must be."""


def load_model(
    folder: Path,
    num_slots: int,
    max_context: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    *,
    record_experts: bool = False,
) -> LoadedModel:
    """Load `folder` for `num_slots` slots. Raises `ValueError` if it is unusable.

    Args:
        folder: config.json, tokenizer, *.safetensors.
        num_slots: slots 0 .. num_slots-1 exist.
        max_context: most tokens a sequence may have; by default what the model allows.
        dtype: "float32", "bfloat16" or "auto", bfloat16 on a GPU.
        device: "cpu", "cuda" or "auto", a GPU if there is one.
        record_experts: keep what its routers choose.
    """
    check_model_folder(folder)
    config = read_config(folder)
    most = check_rows(folder, max_context)
    place = _device(device)
    model = load_causal(folder, _dtype(dtype, place)).eval().requires_grad_(False).to(place)
    # Names and ties, before the model may go.
    names = storages(model.state_dict())
    experts = ExpertSlots(_routing(model), num_slots) if record_experts else None
    rows: RowModel = TransformersModel(model, config, names, num_slots, most, experts)
    changes_rotation = _changes_rotation(rows, most)
    if is_llama(config) and row_rope(model) is None:
        with torch.inference_mode():
            faster = LlamaModel(model, names, most)
            judge = TransformersModel(model, config, names, 1, most)
            if _agree(faster, judge, int(config.vocab_size), most, place):
                rows = faster
    return LoadedModel(
        rows=rows,
        max_context=most,
        vocab_size=int(config.vocab_size),
        eos_token_ids=tuple(sorted(end_ids(folder))),
        changes_rotation=changes_rotation,
        device=place,
    )


def check_rows(folder: Path, max_context: int | None = None) -> int:
    """The most tokens of a row; reads no weights.

    Raises:
        ValueError: rows of the model cannot be cached, or not as many as are asked for.
    """
    config = read_config(folder)
    return context(config, max_context, longest_row(folder, config, _trial_rows))


def _trial_rows(model: Any, num_slots: int, most: int) -> RowModel:
    """What computes rows of a model, as `load_model` chooses it."""
    config, names = model.config.get_text_config(decoder=True), storages(model.state_dict())
    if is_llama(config) and row_rope(model) is None:
        return LlamaModel(model, names, most)
    return TransformersModel(model, config, names, num_slots, most)


def _routing(model: nn.Module) -> RoutingShape:
    try:
        return prepare_routers(model)
    except ValueError as error:
        raise ValueError(f"record_routed_experts is true: {error}; set it to false") from None


def _changes_rotation(rows: RowModel, max_context: int) -> bool:
    """Whether sequences change their rotary frequencies as they grow; if so, warn of it."""
    if rows.rotation(max_context) == (first := rows.rotation(1)):
        return False
    same = bisect_left(range(max_context), True, key=lambda n: rows.rotation(n) != first, lo=1) - 1
    get_logger().warning(
        "rope_changes_with_length",
        max_context=max_context,
        same_up_to=same,
        cure=f"tokens before position {same} of longer sequences are sampled by other rotary "
        f"frequencies than they are trained with: set max_context to {same} if that is enough",
    )
    return True


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch_device is cuda: torch sees no GPU; take cpu or auto")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        # Without hardware for it bfloat16 is several times slower than float32.
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _agree(
    one: RowModel, other: RowModel, vocab_size: int, max_context: int, device: torch.device
) -> bool:
    """Whether two models give equal logits after some prompts, cached in two parts."""
    tokens = [token * 7919 % vocab_size for token in range(min(41, max_context))]
    results = []
    for rows in (one, other):
        for start, end in ((0, 17), (17, len(tokens) - 1)):
            if tokens[start:end]:
                part = Part(
                    slot=0, start=start, token_ids=tokens[start:end], row_length=len(tokens)
                )
                rows.forward(step_of([], [], [], [part], device))
        position = len(tokens) - 1
        results.append(rows.forward(step_of([0], [tokens[-1]], [position], [], device)))
        rows.free([0])
    first, second = results
    assert first is not None and second is not None
    tolerance = _TOLERANCE[second.dtype] * max(1.0, second.abs().max().item())
    return bool((first - second).abs().max() <= tolerance)


class TransformersModel:
    """A `RowModel` of any architecture: its own modules over a slotted cache."""

    supports_mixed_batches = False

    def __init__(
        self,
        model: Any,
        config: Any,
        names: Storages,
        num_slots: int,
        max_context: int,
        experts: ExpertSlots | None = None,
    ) -> None:
        """Run `model`, whose text configuration is `config`; its routers record to `experts`."""
        self._model = model
        self._experts = experts
        self._names = names
        self._max_context = max_context
        self._cache_size = (int(config.num_hidden_layers), num_slots, max_context)
        self._cache = SlotCache(*self._cache_size)
        self._rope = row_rope(model)

    def rotation(self, length: int) -> int:
        """Differs where the rotary frequencies depend on the length."""
        return self._rope.rotation(length) if self._rope else 0

    def forward(self, step: Step) -> Tensor | None:
        """One pass for the parts of each length, and one for the rows; their logits [R, V]."""
        for group in _groups(step.parts):
            self._fill(group)
        if not step.slots:
            return None
        width = -(-step.longest // _PROMPT) * _PROMPT
        self._set_lengths(step.positions_R + 1)
        logits_R1V = self._run(
            self._model, step.slots, step.tokens_R[:, None], step.positions_R[:, None], width
        ).logits
        return logits_R1V[:, 0]  # type: ignore[no-any-return]

    def _fill(self, parts: Sequence[Part]) -> None:
        """Prefill parts, right-padded to the longest.

        Padding writes positions no mask lets anyone read before real tokens overwrite them.
        """
        length = max(len(part.token_ids) for part in parts)
        device = self._model.device
        tokens_RS = torch.tensor(
            [part.token_ids + [0] * (length - len(part.token_ids)) for part in parts],
            device=device,
        )
        start_R1 = torch.tensor([[part.start] for part in parts], device=device)
        # Padding may reach past the positions a model has learned.
        last = self._max_context - 1
        positions_RS = (start_R1 + torch.arange(length, device=device)).clamp_(max=last)
        width = min(max(part.start for part in parts) + length, self._max_context)
        # The base model has no head: logits come from the pass that feeds the last token.
        slots = [part.slot for part in parts]
        self._set_lengths(torch.tensor([part.row_length for part in parts], device=device))
        self._run(self._model.base_model, slots, tokens_RS, positions_RS, width)

    def _set_lengths(self, lengths_R: Tensor) -> None:
        if self._rope is not None:
            self._rope.lengths_R = lengths_R

    def _run(
        self, module: Any, slots: list[int], tokens_RS: Tensor, positions_RS: Tensor, width: int
    ) -> Any:
        window, device = self._cache.window, self._model.device
        window.slots_R = torch.tensor(slots, device=device)
        window.dense = len(slots) if slots == list(range(len(slots))) else 0
        window.positions_RS, window.width = positions_RS, width
        hidden_RST = torch.arange(width, device=device) > positions_RS[..., None]
        dtype = self._model.dtype
        with self._recording(slots, positions_RS):
            return module(
                input_ids=tokens_RS,
                position_ids=positions_RS,
                attention_mask=(hidden_RST.to(dtype) * torch.finfo(dtype).min)[:, None],
                use_cache=True,
                **{_cache_argument(module.__class__): self._cache},
            )

    def _recording(self, slots: list[int], positions_RS: Tensor) -> AbstractContextManager[None]:
        if self._experts is None:
            return nullcontext()
        return recording(functools.partial(self._experts.put, slots, positions_RS))

    def read(self, slot: int, positions: int) -> list[Tensor]:
        cached = self._cache.read(slot, positions)
        if self._experts is not None:
            cached.append(torch.from_numpy(self._experts.read(slot, 0, positions)))
        return cached

    def write(self, slot: int, cached: list[Tensor], positions: int) -> None:
        self._cache.write(slot, cached, positions)
        if self._experts is not None:
            self._experts.write(slot, cached[-1].numpy(), positions)

    def experts(self, slot: int, start: int, stop: int) -> NDArray[Any] | None:
        return None if self._experts is None else self._experts.read(slot, start, stop)

    def free(self, slots: list[int]) -> None:
        """Do nothing: the next sequence overwrites the slot."""

    def reader(self) -> CheckedTensors:
        """For a checkpoint with the names of the modules; another is refused by its first file."""
        return CheckedTensors(self._names, self._model.dtype)

    def read_weights(self, folder: Path) -> dict[str, Tensor]:
        if has_module_names(folder, self._names):
            return read_folder(self.reader(), folder)  # type: ignore[no-any-return]
        return load_converted(folder, self._names, self._model.dtype)

    def use_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy into the parameters and buffers, which are allocated again if released."""
        tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        for name, tensor in tensors.items():
            if name in weights and tensor.shape != weights[name].shape:
                tensor.data = torch.empty_like(weights[name], device=tensor.device)
        for name, tensor in self._model.state_dict().items():
            tensor.copy_(weights[name])

    def release(self) -> int:
        freed = self._cache.nbytes
        self._cache = SlotCache(*self._cache_size)
        for parameter in self._model.parameters():
            freed += parameter.nbytes
            parameter.data = parameter.data.new_empty(0)
        return freed


@functools.cache
def _cache_argument(module: type[nn.Module]) -> str:
    """The cache's name in `forward`: past_key_values before transformers 5.24."""
    parameters = inspect.signature(module.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _groups(parts: list[Part]) -> list[list[Part]]:
    """Group parts so that none is padded to over twice its length."""
    groups: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: len(part.token_ids)):
        if groups and len(part.token_ids) <= 2 * len(groups[-1][0].token_ids) + _PROMPT:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def read_config(folder: Path) -> Any:
    """Return the text model's configuration. Raises `ValueError` if no row of it can be cached."""
    text = read_text_config(folder)
    check_layers(folder, text)
    return text


def context(config: Any, max_context: int | None, longest: int | None = None) -> int:
    """Return the context to serve, checked against the model.

    Args:
        config: of the model.
        max_context: that is asked for; None: what the model allows.
        longest: tokens of the longest row that is computed exactly; None: any.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 4096)
    limit = min(limit, longest or limit)
    most = min(int(limit * _growth(config)), longest or sys.maxsize)
    if max_context is not None and max_context > most:
        raise ValueError(f"max_context is {max_context}: this model reads at most {most} tokens")
    return max_context or limit


def _growth(config: Any) -> float:
    """How many times its context a model reads if asked to: `dynamic` rope grows with the row."""
    rope = getattr(config, "rope_parameters", None) or {}
    parameters = (rope, *(each for each in rope.values() if isinstance(each, dict)))
    return max(
        (float(p.get("factor") or 1) for p in parameters if p.get("rope_type") == "dynamic"),
        default=1.0,
    )
