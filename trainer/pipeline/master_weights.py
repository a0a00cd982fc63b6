"""float32 weights behind those that a stage computes with in bfloat16.

As FSDP's mixed precision does: each micro-batch's gradient is computed in bfloat16 and added up in
float32, and the optimizer sees float32 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn


class MasterWeights:
    """Of the parameters of a rank."""

    def __init__(self, computed: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        """Take over the weights of `computed`, which from now on have type `dtype`."""
        self._computed = dict(computed)
        self.parameters = {
            name: nn.Parameter(parameter.detach().clone()) for name, parameter in computed.items()
        }
        """By name; they get the gradients."""
        for name, parameter in self._computed.items():
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_move_gradient, self.parameters[name])
            )

    @property
    def computed(self) -> list[torch.Tensor]:
        """What the stages compute with."""
        return [parameter.detach() for parameter in self._computed.values()]

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute with the present weights from now on."""
        for name, parameter in self._computed.items():
            parameter.copy_(self.parameters[name])


def _move_gradient(master: nn.Parameter, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "called once it is there"
    wide = parameter.grad.to(master.dtype)
    master.grad = wide if master.grad is None else master.grad.add_(wide)
    parameter.grad = None
