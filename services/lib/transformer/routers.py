"""The routers of a mixture-of-experts model: their choices are recorded, and replayed.

Routers of the engine and of the trainer choose differently where two scores are almost equal, and
log-probs then differ by far more than by rounding. Rollout routing replay (R3, arXiv 2510.11370)
lets the trainer's routers choose what those of the engine chose, with their own weights for it, so
that they still get gradients.

One rule covers all families of transformers whose routers are modules: a router chooses by one
top-k over the scores of all its experts. In a replay, this call answers with the record, and with
the scores that the recorded experts have now; the rest, such as normalisation, bias and scaling,
is the router's own code. `prepare_routers` tries that on a copy of each kind of router.

Shape suffixes: N tokens of a pass, L layers, K chosen experts.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from services.lib.routed_experts import RoutingShape
from services.lib.transformer.load_causal import transformer_blocks

_TOP_K = (torch.topk, torch.Tensor.topk)
_TRIED_TOKENS = 3


class _Present(threading.local):
    """What the routers of this thread's pass do."""

    experts_NLK: torch.Tensor | None = None
    take: Callable[[int, torch.Tensor], None] | None = None


_present = _Present()


def prepare_routers(model: nn.Module) -> RoutingShape:
    """Let the routers of a model be recorded and replayed, in place; its weights may be absent.

    Raises:
        ValueError: it has no routers, or one that chooses in another way; names the model.
    """
    blocks = transformer_blocks(model)
    routers = {n: found for n, block in enumerate(blocks) if (found := _router(block)) is not None}
    if not routers:
        raise ValueError(f"{type(model).__name__} has no module that routes tokens to experts")
    first = next(iter(routers.values()))
    if not _follows(first):
        raise ValueError(
            f"{type(model).__name__} has routers ({type(first).__name__}) that do not choose by "
            "one top-k over all experts"
        )
    for number, router in routers.items():
        router.forward = partial(_routed, router.forward, number, router.num_experts)
    return RoutingShape(len(blocks), int(first.top_k), int(first.num_experts))


@contextmanager
def replaying(experts_NLK: torch.Tensor | None) -> Iterator[None]:
    """Within the block, prepared routers choose what is given; None: freely.

    Args:
        experts_NLK: int16; less than 0: this token is routed freely.
    """
    before, _present.experts_NLK = _present.experts_NLK, experts_NLK
    try:
        yield
    finally:
        _present.experts_NLK = before


@contextmanager
def recording(take: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Within the block, `take` gets the layer and the choices, [N, K], of each prepared router."""
    _present.take = take
    try:
        yield
    finally:
        _present.take = None


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of activation checkpointing: the recomputation replays what the pass did.

    It may run in another thread, and after the passes of other micro-batches.
    """
    return nullcontext(), replaying(_present.experts_NLK)


class _Given(TorchFunctionMode):
    """Within it, the top-k over all experts answers with given choices."""

    def __init__(self, experts_NK: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts_NK, self._num_experts = experts_NK.long(), num_experts
        self.answers: list[torch.Tensor] = []
        """The choices that it answered with."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOP_K or found.indices.shape != self._experts_NK.shape:
            return found
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._num_experts:
            return found
        free_N1 = (self._experts_NK < 0).any(-1, keepdim=True)
        chosen_NK = torch.where(free_N1, found.indices, self._experts_NK)
        self.answers.append(chosen_NK)
        return torch.return_types.topk((scores.gather(-1, chosen_NK), chosen_NK))


def _routed(plain: Any, layer: int, num_experts: int, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a prepared router."""
    if (experts_NLK := _present.experts_NLK) is not None:
        with _Given(experts_NLK[:, layer], num_experts):
            return plain(*args, **kwargs)
    found = plain(*args, **kwargs)
    if _present.take is not None:
        _present.take(layer, found[-1])
    return found


def _router(block: nn.Module) -> Any:
    """The router of a block; None: it has none."""
    for module in block.modules():
        named = "router" in type(module).__name__.lower()
        if named and hasattr(module, "top_k") and hasattr(module, "num_experts"):
            return module
    return None


@torch.no_grad()
def _follows(router: Any) -> bool:
    """Whether it answers with the choices that it is given; tried with weights of its own.

    The values of tensors are not looked at: they may have none.
    """
    tried, number = _without_weights(router), int(router.num_experts)
    chosen_NK = torch.arange(int(router.top_k)).expand(_TRIED_TOKENS, -1)
    mode = _Given(chosen_NK, number)
    try:
        with mode:
            found = tried(torch.ones(_TRIED_TOKENS, next(tried.parameters()).shape[-1]))
    except Exception:  # a router of another form may raise anything
        return False
    return len(mode.answers) == 1 and isinstance(found, tuple) and found[-1] is mode.answers[0]


def _without_weights(router: nn.Module) -> nn.Module:
    """A copy of a module without submodules whose weights are zeros on the host."""
    copied = copy.copy(router)
    for kind in ("_parameters", "_buffers"):
        given = {name: each for name, each in getattr(router, kind).items() if each is not None}
        zeros = {name: nn.Parameter(torch.zeros(each.shape)) for name, each in given.items()}
        setattr(copied, kind, {**dict.fromkeys(getattr(router, kind)), **zeros})
    return copied
