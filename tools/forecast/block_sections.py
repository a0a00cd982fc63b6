"""The sections of a pass: blocks forward, the head, blocks backward, the update.

The peak of each section is linear in the number of equal blocks, that of a whole pass is not: it
moves from one section to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tools.forecast.live_bytes import LiveBytes, Section

# What is done, by the model of which number, in which block: the first ones are 0 and 1, the last
# ones -1 and -2, and those between count from the last.
START: Section = ("start", 0, 0)
UPDATE: Section = ("update", 0, 0)
_ENDS = 2


def divide(blocks: Sequence[nn.Module], model: int, live: LiveBytes) -> None:
    """Let a pass through the blocks begin a section with each of them, in either direction.

    Args:
        blocks: sharded already, so that what FSDP does before a block is before its section.
        model: its number.
        live: counts the sections and what is held in each.
    """
    for index, block in enumerate(blocks):
        place = index if index < _ENDS else index - len(blocks)
        forward, backward = ("forward", model, place), ("backward", model, place)
        after = ("head", model, 0) if index == len(blocks) - 1 else forward
        block.register_forward_pre_hook(_begins(live, forward), prepend=True)
        block.register_forward_hook(_ends(live, after, backward))


def _begins(live: LiveBytes, section: Section) -> Any:
    def begin(*_: object) -> None:
        live.begin(section)

    return begin


def _ends(live: LiveBytes, after: Section, backward: Section) -> Any:
    def end(_: object, __: object, output: object) -> None:
        live.begin(after)
        first: Any = next(each for each in tree_leaves(output) if isinstance(each, torch.Tensor))
        if first.requires_grad:
            first.register_hook(lambda _: live.begin(backward))

    return end
