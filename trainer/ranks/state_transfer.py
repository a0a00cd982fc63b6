"""The training state, from the ranks of an earlier process group to those of the present one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from trainer.checkpoint.checkpoint_files import rows_of_part
from trainer.policy.policy import Policy

_MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def transfer(
    policy: Policy, held: Mapping[str, torch.Tensor], sources: Sequence[int], device: str
) -> None:
    """Load a policy's part of the state that other ranks hold. Collective.

    Args:
        policy: new on every rank.
        held: `Policy.held_state` of this rank in the group before; empty if it was in none.
        sources: ranks of the present group that hold the parts of each tensor, in order.
        device: of the collectives.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, like in policy.whole_like():
        # The first part is never empty, so its rank has the state of the optimizer, if there is.
        step = held.get(f"step.{name}", torch.zeros(()))
        tensors[f"step.{name}"] = step = _sent(step, sources[0], torch.zeros(()), device).cpu()
        for key in ("parameter", *(_MOMENTS if step else ())):
            full = f"{key}.{name}"
            whole = _put_together(held.get(full), sources, like, device)
            first, last = rows_of_part(policy, len(whole))
            tensors[full] = whole[first:last].clone()
    policy.load_state(tensors)


def _put_together(
    mine: torch.Tensor | None, sources: Sequence[int], like: torch.Tensor, device: str
) -> torch.Tensor:
    """The whole tensor of which each source has a part; as FSDP, in fewer parts if it is small."""
    parts = zip(sources, like.chunk(len(sources)), strict=False)
    return torch.cat([_sent(mine, source, part, device) for source, part in parts])


def _sent(mine: torch.Tensor | None, source: int, like: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor of the rank `source`, on all ranks."""
    if dist.get_rank() == source:
        assert mine is not None, "a source has every part"
        tensor = mine.to(device).contiguous()
    else:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    dist.broadcast(tensor, source)
    return tensor
