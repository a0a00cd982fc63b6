"""Fill a sharded model from its folder: each rank reads the rows that it holds, block by block.

The names and layouts of a folder may differ from those of the modules, such as experts that are one
file entry each and one stacked parameter together. transformers converts them; here it does so on a
second model without memory, whose parameters are rows of this rank, and the result is copied over.
"""
# ruff: noqa: N803 -- tensors carry shape suffixes

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from services.lib.model_files.weight_headers import weight_files
from trainer.model.critic import is_critic
from trainer.model.lora import is_adapter, plain_name

_SHOWN = 3
_NUMBER = re.compile(r"\.(\d+)\.")
_BY_EXPERT = ("MergeModulelist", "Concatenate")
"""Conversions that rows of the result, experts, can go through alone."""


def empty_causal(folder: Path, dtype: torch.dtype) -> Any:
    """The causal language model of a folder: parameters without memory, buffers as computed.

    Raises:
        ValueError: transformers does not know such a model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with _parameters_on_meta():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"model {folder}: cannot be loaded: {error}") from error
    model.tie_weights()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made within have parameters without memory."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(model: nn.Module, device: str) -> None:
    """Give the parameters memory on a device, in place; tied ones stay one."""
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        empty = partial(torch.empty_like, device=device)
        model._apply(lambda each: empty(each) if each.is_meta else each)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)


def fill(
    wanted: Mapping[str, torch.Tensor],
    whole: Any,
    folder: Path,
    *,
    part: int = 0,
    num_parts: int = 1,
) -> None:
    """Copy the weights of a folder into this rank's tensors; no others are read.

    Args:
        wanted: by the folder's names, such as `folder_tensors` of a sharded model.
        whole: the causal language model whose names these are.
        folder: Hugging Face folder with safetensors.
        part: of this rank, from 0: `torch.chunk` cuts dimension 0.
        num_parts: of each parameter.

    Raises:
        ValueError: a parameter is not in the folder, or has another shape there.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    rows = _Rows(whole.config, next(iter(whole.parameters())).dtype, part, num_parts)
    missing = set(wanted)
    with ExitStack() as stack:
        for sources in _by_block(_slices(folder, stack)):
            for name, local in rows.read(sources, wanted.keys()):
                for own in rows.aliases(name) & wanted.keys():
                    _copy(wanted[own], local, own, folder)
                    missing.discard(own)
    whole._weight_conversions = rows.used_conversions or None
    if missing:
        # transformers would go on with random numbers.
        raise ValueError(
            f"model {folder}: has no weights for {', '.join(sorted(missing)[:_SHOWN])} "
            f"({len(missing)} parameters); copy the whole folder, or the configuration that "
            "belongs to it"
        )


def folder_tensors(model: nn.Module, whole: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of what a folder has, by its names: no adapters, no critic's layer.

    Args:
        model: sharded, or with fewer modules than `whole`.
        whole: the causal language model that it is made of; an adapter may be added to it.
    """
    names = {id(each): name for name, each in (*whole.named_parameters(), *whole.named_buffers())}
    persistent = model.state_dict()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        full = names.get(id(tensor), name)
        if name in persistent and not (is_adapter(full) or is_critic(name)):
            yield plain_name(full), _own(tensor)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Shares its memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


@torch.no_grad()
def _copy(target: torch.Tensor, local: torch.Tensor, name: str, folder: Path) -> None:
    if target.shape != local.shape:
        raise ValueError(
            f"model {folder}: {name} has {tuple(local.shape)} rows and columns for this rank, the "
            f"model {tuple(target.shape)}: copy the configuration that belongs to the weights"
        )
    target.copy_(local)


class _Rows:
    """A second model without memory, whose parameters get this rank's rows."""

    def __init__(self, config: Any, dtype: torch.dtype, part: int, num_parts: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.conversion_mapping import get_model_conversion_mapping

        with torch.device("meta"):
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        self._model.tie_weights()
        self._dtype, self._part, self._num_parts = dtype, part, num_parts
        self._conversions: Any = get_model_conversion_mapping(self._model)
        self._shapes = {name: each.shape for name, each in self._model.state_dict().items()}
        self._buffers = {name for name, _ in self._model.named_buffers()}
        tied: dict[int, set[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), set()).add(name)
        self._aliases = {name: names for names in tied.values() for name in names}

    @property
    def used_conversions(self) -> list[Any]:
        """Of the folder's names, which are reverted when weights are published."""
        return [each for each in self._conversions if each.was_used()]

    def aliases(self, name: str) -> set[str]:
        """Names of the same parameter, which is tied."""
        return self._aliases.get(name, {name})

    def read(
        self, sources: Mapping[str, Any], wanted: Set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and local rows of what the entries of a folder are, if a name of it is wanted."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        targets = {
            key: target
            for key, target in self._targets(sources)
            if any(self.aliases(name) & wanted for name in target.names)
        }
        for target in targets.values():
            for name in target.names:
                self._set_empty(name, by_rows=target.by_rows)
        given = {key: each for target in targets.values() for key, each in self._given(target)}
        config = LoadStateDictConfig(dtype=self._dtype, weight_mapping=self._conversions)
        convert_and_load_state_dict_in_model(self._model, given, config)
        for target in targets.values():
            for name in target.names:
                yield from self._found(name, whole=target.whole, by_rows=target.by_rows)

    def _targets(self, sources: Mapping[str, Any]) -> Iterator[tuple[str, _Target]]:
        """What the entries of a folder become."""
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        renamings = [each for each in self._conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in self._conversions if isinstance(each, WeightConverter)]
        of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, meta = self._model.base_model_prefix, self._model.state_dict()
        found: dict[str, _Target] = {}
        for key in sorted(sources, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, meta)
            converter = None if pattern is None else of_pattern[pattern]
            names = [each for each in _target_names(name, converter) if each in self._shapes]
            whole = not self._buffers.isdisjoint(names)
            target = found.setdefault(name, _Target(names, converter, whole=whole))
            target.sources.setdefault(pattern or key, {})[key] = sources[key]
        yield from ((name, target) for name, target in found.items() if target.names)

    def _given(self, target: _Target) -> Iterator[tuple[str, Any]]:
        """The entries, or this rank's rows of them, or of experts those of this rank."""
        for entries in target.sources.values():
            if not target.by_rows:
                yield from entries.items()
            elif target.converter is None:
                yield from ((key, _RowsOf(each, self._span)) for key, each in entries.items())
            else:
                yield from list(entries.items())[self._span(len(entries))]

    def _span(self, size: int) -> slice:
        """This rank's part of dimension 0, as `torch.chunk` cuts."""
        rows = -(-size // self._num_parts)
        return slice(min(self._part * rows, size), min((self._part + 1) * rows, size))

    def _set_empty(self, name: str, *, by_rows: bool) -> None:
        owner, _, last = name.rpartition(".")
        module, shape = self._model.get_submodule(owner), self._shapes[name]
        empty = torch.empty(shape, dtype=getattr(module, last).dtype, device="meta")
        if by_rows and empty.dim():
            empty = empty[self._span(len(empty))]
        if last not in module._buffers:
            empty = nn.Parameter(empty, requires_grad=empty.is_floating_point())
        setattr(module, last, empty)

    def _found(
        self, name: str, *, whole: bool, by_rows: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The rows, if there are any; the model has no memory of them any more."""
        owner, _, last = name.rpartition(".")
        found = getattr(self._model.get_submodule(owner), last).detach()
        self._set_empty(name, by_rows=False)
        if not found.is_meta:
            is_part = whole or by_rows or not found.dim()
            yield name, found if is_part else found[self._span(len(found))]
        elif not found.numel():
            yield name, torch.empty_like(found, device="cpu")


class _Target:
    """Parameters that are made of the same entries of a folder."""

    def __init__(self, names: list[str], converter: Any, *, whole: bool) -> None:
        self.names, self.converter, self.whole = names, converter, whole
        self.by_rows = not whole and (converter is None or _keeps_rows(converter))
        """Whether a rank can do with its own rows of the entries."""
        self.sources: dict[str, dict[str, Any]] = {}
        """By pattern of their names, in order."""


class _RowsOf:
    """Rows of an entry that are read when they are asked for."""

    def __init__(self, entry: Any, span: Callable[[int], slice]) -> None:
        self._entry, self._span = entry, span

    def __getitem__(self, key: object) -> torch.Tensor:
        """All of these rows."""
        shape = self._entry.get_shape()
        rows: torch.Tensor = self._entry[self._span(shape[0])] if shape else self._entry[...]
        return rows


def _keeps_rows(converter: Any) -> bool:
    """Whether the rows of a result come of the same rows, experts, of its sources."""
    kinds = [type(operation).__name__ for operation in converter.operations]
    of_rows = [getattr(operation, "dim", 0) for operation in converter.operations]
    return kinds == list(_BY_EXPERT[: len(kinds)]) and of_rows[0] == 0 and 0 not in of_rows[1:]


def _target_names(name: str, converter: Any) -> Iterator[str]:
    """All results of a conversion, given the first one's full name."""
    yield name
    if converter is not None:
        first, *others = converter.target_patterns
        for other in others:
            yield name.replace(first, other)


def _slices(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The entries of a folder, which are not read yet."""
    files = (stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(folder))
    slices = {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118
    return with_experts(slices)


def _by_block(sources: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Entries of one block after the other: what has the same first number in its name."""
    blocks: dict[str, dict[str, Any]] = {}
    for key, source in sources.items():
        number = _NUMBER.search(key)
        blocks.setdefault(number[1] if number else key, {})[key] = source
    yield from blocks.values()


_BLOCKS, _SCALES = "_blocks", "_scales"
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_HALF, *(-each for each in _HALF)], dtype=torch.bfloat16)
"""E2M1 by its four bits; with any exponent they are exact in bfloat16."""
_BIAS = 127


def with_experts(slices: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a folder, with the numbers that mxfp4 experts stand for, such as gpt-oss's.

    OCP Microscaling formats 1.0: 32 numbers of 4 bits share a power of two. A folder has, for each
    expert and each row of its matrix, `_blocks` of 16 bytes, the first number of a pair in the
    lower bits, and one byte of `_scales` for each block, the exponent plus 127. A row is an output,
    the modules have them as columns. Shape suffixes: E experts, R rows, G blocks of a row, B bytes
    of a block.
    """
    found = {}
    for name, entry in slices.items():
        if name.endswith(_BLOCKS):
            whole = name.removesuffix(_BLOCKS)
            found[whole] = _MXFP4Experts(entry, slices[whole + _SCALES])
        elif name.removesuffix(_SCALES) + _BLOCKS not in slices:
            found[name] = entry
    return found


class _MXFP4Experts:
    """An entry, [E, 2 * G * B, R] in bfloat16, whose experts are read when they are asked for."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        """Its shape."""
        experts, rows, blocks, size = self._blocks.get_shape()
        return [experts, 2 * blocks * size, rows]

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Some experts, by a slice of dimension 0, or all."""
        return _numbers(self._blocks[key], self._scales[key])


def _numbers(blocks_ERGB: torch.Tensor, scales_ERG: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([blocks_ERGB & 0xF, blocks_ERGB >> 4], -1).flatten(-2)
    exponents = scales_ERG.to(torch.int32)[..., None] - _BIAS
    return torch.ldexp(_VALUES[pairs.int()], exponents).flatten(-2).transpose(1, 2).contiguous()
