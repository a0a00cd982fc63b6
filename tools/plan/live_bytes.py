"""Live bytes and FLOPs of tensors, counted operation by operation; none needs memory for it.

A storage is counted when the first tensor on it is seen, and again when FSDP changes its size:
gathered weights are storages that are emptied and filled. torch's own `FSDPMemTracker` has no label
for logits, counts what is offloaded to the host, and follows one sharded model; the trainer has two
where there is a critic.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

_Shape = tuple[int, ...]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, counts the tensors that operations give, and keeps the peak.

    Args:
        label: of a new storage, from the first tensor on it.
        on_device: whether a label is on the device; others are no part of the peak.
    """

    def __init__(
        self, label: Callable[[torch.Tensor], str], on_device: Callable[[str], bool]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._label = label
        self._on_device = on_device
        self._sizes: dict[int, tuple[str, int]] = {}
        self._live: Counter[str] = Counter()
        self._total = 0
        self._is_counting = True
        self._peak = 0
        self.exchanged_bytes = 0
        """Of all-to-alls, with what a rank keeps."""
        self.peak: Mapping[str, int] = {}
        """Bytes by label when most were alive, within the block."""

    def count(self, tensor: torch.Tensor, label: str) -> None:
        """Count a tensor that was there before the block, or give it another label."""
        storage = _storage(tensor)
        if storage is not None:
            self._forget(storage._cdata)
            self._add(storage, label)

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """What is made within is on the host."""
        self._is_counting = False
        try:
            yield
        finally:
            self._is_counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket is torch.ops.c10d.alltoall_base_:
            self.exchanged_bytes += args[1].nbytes
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if self._is_counting and isinstance(each, torch.Tensor):
                self._see(each)
        return found

    def __enter__(self) -> Any:
        """Watch storages that change their size, too."""
        resize, counter = torch.UntypedStorage.resize_, self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            if storage._cdata in counter._sizes:
                label, _ = counter._sizes[storage._cdata]
                counter._change(storage._cdata, (label, storage.nbytes()))
            return done

        self._resize = resize
        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        self._note_peak()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _see(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage is not None and storage._cdata not in self._sizes:
            self._add(storage, self._label(tensor))

    def _add(self, storage: torch.UntypedStorage, label: str) -> None:
        self._change(storage._cdata, (label, storage.nbytes()))
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        if key in self._sizes:
            self._change(key, None)

    def _change(self, key: int, size: tuple[str, int] | None) -> None:
        if key in self._sizes:
            label, num_bytes = self._sizes.pop(key)
            self._live[label] -= num_bytes
            self._total -= num_bytes if self._on_device(label) else 0
        if size is not None:
            label, num_bytes = self._sizes[key] = size
            self._live[label] += num_bytes
            self._total += num_bytes if self._on_device(label) else 0
            self._note_peak()

    def _note_peak(self) -> None:
        if self._total > self._peak or not self.peak:
            self._peak, self.peak = self._total, dict(self._live)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Of this rank's part of a tensor."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return None if local.layout != torch.strided else local.untyped_storage()


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, counts the floating-point operations of products and attention.

    Causal attention counts half of the operations that its shapes allow.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._formulas: Mapping[Any, Callable[..., int]] = {**flop_registry, **_own_formulas()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=found)
        return found


def _own_formulas() -> Mapping[Any, Callable[..., int]]:
    from transformers.integrations import moe  # noqa: F401 -- it declares operations

    aten, experts = torch.ops.aten, torch.ops.transformers
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.mkldnn._linear_pointwise: _linear,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten._grouped_mm: _grouped,
        experts.grouped_mm_fallback: _grouped,
        experts.grouped_mm_fallback_backward: _grouped_backward,
    }
    wrap: Any = shape_wrapper
    return {operation: wrap(formula) for operation, formula in formulas.items()}


def _linear(inputs: _Shape, weight: _Shape, *_: Any, **__: Any) -> int:
    """Of [..., I] by [O, I]."""
    return 2 * math.prod(inputs) * weight[0]


def _attention(
    query: _Shape,
    key: _Shape,
    value: _Shape,
    dropout: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> int:
    wide = _heads(key, query), _heads(value, query)
    flops: int = sdpa_flop_count(query, *wide)  # type: ignore[no-untyped-call]
    return flops // (1 + is_causal)


def _attention_backward(
    grad: _Shape,
    query: _Shape,
    key: _Shape,
    value: _Shape,
    out: _Shape,
    logsumexp: _Shape,
    dropout: float,
    is_causal: bool,
    **_: Any,
) -> int:
    wide = _heads(key, query), _heads(value, query)
    flops: int = sdpa_backward_flop_count(grad, query, *wide)  # type: ignore[no-untyped-call]
    return flops // (1 + is_causal)


def _heads(shape: _Shape, query: _Shape) -> _Shape:
    """Keys or values as if each query head had its own."""
    return (shape[0], query[1], *shape[2:])


def _grouped(left: _Shape, right: _Shape, *_: Any, **__: Any) -> int:
    """Of [S, I] by [E, I, O], whose rows each meet one expert, and of [I, S] by [S, O]."""
    return 2 * left[0] * left[1] * right[-1]


def _grouped_backward(left: _Shape, right: _Shape, *_: Any, **__: Any) -> int:
    return 2 * _grouped(left, right)
