"""Rotary positions whose frequencies depend on the length of a row, computed for each row alone.

transformers takes the longest row of a pass as the length of all (and, for `dynamic`, remembers the
longest row so far), so that the log-probs of a row depend on what else is computed: `longrope`
(Phi-3-128k, Phi-4-mini) and `dynamic` beyond their original context. Here each row gets the
frequencies that transformers gives it when it is computed alone by a model just loaded. Whether
frequencies depend on the length is asked of the modules, not of names of rope types.

Shape suffixes: R rows, S tokens of each, padded on the right.
"""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

_KEPT = "seamflow_row_rope"
"""Attribute of a model that was asked."""
_FAR = 2
"""Lengths are tried up to this multiple of the longest context that a configuration names."""
_MAX_KNOWN = 4096


class RowRope:
    """The rotary modules of a model that depend on the length, changed in place."""

    def __init__(self, modules: list[_Rotary]) -> None:
        self._modules = modules
        self.lengths_R: Tensor | None = None
        """Lengths of the rows of the next pass, int64; None: the last position of each row."""
        self.rotation = lru_cache(_MAX_KNOWN)(self._rotation)
        """A number for the frequencies of rows of a length: equal if the frequencies are."""
        self._known: dict[bytes, int] = {}
        for each in modules:
            each.replace_forward(self)

    def _rotation(self, length: int) -> int:
        angles = b"".join(module.angles(max(length, 2)) for module in self._modules)
        return self._known.setdefault(angles, len(self._known))


def row_rope(model: nn.Module) -> RowRope | None:
    """Let a model compute each row as if alone; None if it does anyway.

    If not None, a pass needs `position_ids`, [R, S], as `row_positions` gives them, and rows cannot
    be packed. Asking again gives the same.
    """
    if _KEPT not in vars(model):
        modules = [_Rotary(module, each) for module, each in _rotary_modules(model)]
        changing = [each for each in modules if each.depends_on_length()]
        vars(model)[_KEPT] = RowRope(changing) if changing else None
    found: RowRope | None = vars(model)[_KEPT]
    return found


def row_positions(lengths_R: Tensor, width: int) -> Tensor:
    """Positions of padded rows, [R, S]: padding repeats the last one, which is the row's length."""
    positions_S = torch.arange(width, device=lengths_R.device)
    return torch.minimum(positions_S, lengths_R[:, None] - 1)


class _Rotary:
    """A rotary module, and the state of one that has computed nothing yet."""

    def __init__(self, module: nn.Module, layer_types: list[str | None]) -> None:
        self._module: Any = module
        self._layer_types = layer_types
        self._forward: Callable[..., Any] = module.forward
        fresh = type(module)(module.config)
        self._buffers: dict[str, Tensor] = dict(fresh.named_buffers())
        self._numbers = {
            name: value
            for name, value in vars(fresh).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    def depends_on_length(self) -> bool:
        """Whether any length up to far beyond the model's contexts has frequencies of its own."""
        limits = sorted(set(_numbers(self._module.config.to_dict())))
        tried = {2, *limits, *(limit + 1 for limit in limits), *(_FAR * n for n in limits[-1:])}
        return len({self.angles(length) for length in tried}) > 1

    @torch.no_grad()
    def angles(self, length: int) -> bytes:
        """What a row of this length, 2 or more, rotates queries and keys at position 1 with."""
        device = next(self._module.buffers()).device
        like = torch.empty(0, dtype=torch.float32, device=device)
        positions = torch.tensor([[1, length - 1]], device=device)
        found = []
        for layer_type in self._layer_types:
            extra = {} if layer_type is None else {"layer_type": layer_type}
            parts = self._alone(like, positions, **extra)
            found += [torch.view_as_real(p) if p.is_complex() else p for p in _parts(parts)]
        return b"".join(part[:, 0].contiguous().cpu().numpy().tobytes() for part in found)

    def replace_forward(self, rope: RowRope) -> None:
        """Compute row by row from now on."""

        def forward(
            x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
        ) -> Tensor | tuple[Tensor, ...]:
            lengths_R = rope.lengths_R
            if lengths_R is None:
                # Positions of models that also see have more axes, before that of the rows.
                lengths_R = position_ids.amax((*range(position_ids.dim() - 2), -1)) + 1
            return self._by_row(x, position_ids, lengths_R, *args, **kwargs)

        self._module.forward = forward

    def _by_row(
        self, x: Tensor, positions_RS: Tensor, lengths_R: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        axes = positions_RS.shape[:-2]
        positions_RS = positions_RS.expand(*axes, len(lengths_R), -1)
        found: list[list[Tensor]] = [[] for _ in lengths_R]
        alike = False
        for length in sorted(set(lengths_R.tolist())):
            rows = (lengths_R == length).nonzero()[:, 0]
            last = positions_RS.new_full((*axes, len(rows), 1), length - 1)
            ends = torch.cat([positions_RS[..., rows, :].clamp(max=length - 1), last], -1)
            output = self._alone(x, ends, *args, **kwargs)
            alike = isinstance(output, Tensor)
            for place, row in enumerate(rows.tolist()):
                found[row] = [part[place, :-1] for part in _parts(output)]
        parts = tuple(torch.stack(each) for each in zip(*found, strict=True))
        return parts[0] if alike else parts

    def _alone(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As transformers computes rows of one length, in a model that has computed nothing yet."""
        for name, buffer in self._buffers.items():
            self._module._buffers[name] = buffer.to(x.device, copy=True)
        vars(self._module).update(self._numbers)
        return self._forward(x, position_ids, *args, **kwargs)


def _parts(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else output


def _rotary_modules(model: nn.Module) -> Iterator[tuple[nn.Module, list[str | None]]]:
    """Modules of a rope type that may depend on the length, with the layer types they know."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if rope_type is None or not hasattr(module, "config") or not module._buffers:
            continue
        types = rope_type if isinstance(rope_type, Mapping) else {None: rope_type}
        if set(types.values()) != {"default"}:
            yield module, list(types)


def _numbers(settings: Any) -> Iterator[int]:
    """Every number in a configuration that may be a length."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            if isinstance(value, Mapping) or "max" in str(name):
                yield from _numbers(value)
    elif isinstance(settings, int) and settings > 1:
        yield settings
