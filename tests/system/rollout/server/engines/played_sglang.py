"""The engine's side of a broadcast, as a separate process: calls on stdin, answers on stdout.

`python -m tests.system.rollout.server.engines.played_sglang`; each line in is `[path, body]`,
each line out `[answer]`. `/received` answers the SHA-256 of every tensor, `refuse` as an argument
makes every group be refused.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Backend, PrefixStore
from torch.distributed.rendezvous import rendezvous


class Engine:
    """What SGLang does with these calls, as far as the sender can see."""

    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.received: dict[str, str] = {}
        self.label = ""
        self.updating = False

    def answer(self, path: str, body: dict[str, Any]) -> object:
        """Do what a call asks for."""
        if path == "/init_weights_update_group":
            self.groups[body["group_name"]] = _join(body)
        elif path == "/destroy_weights_update_group":
            torch.distributed.destroy_process_group(self.groups.pop(body["group_name"]))
        elif path in ("/begin_weight_update", "/end_weight_update"):
            self.updating = path.startswith("/begin")
        elif path == "/update_weights_from_distributed":
            assert self.updating
            self._receive(body)
        return {"received": self.received, "label": self.label, "groups": len(self.groups)}

    def _receive(self, body: dict[str, Any]) -> None:
        group = self.groups[body["group_name"]]
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            torch.distributed.broadcast(tensor, src=0, group=group)
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            self.received[name] = hashlib.sha256(data).hexdigest()
        self.label = body["weight_version"]


def _join(body: dict[str, Any]) -> Any:
    address = f"tcp://{body['master_address']}:{body['master_port']}"
    rank, size = body["rank_offset"], body["world_size"]
    store, rank, size = next(rendezvous(address, rank, size))
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        Backend(body["backend"]),
        PrefixStore(body["group_name"], store),
        group_name=body["group_name"],
        timeout=distributed_c10d.default_pg_timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {other: other for other in range(size)}
    return group


def main() -> None:
    """Answer until stdin ends."""
    engine = Engine()
    for line in sys.stdin:
        path, body = json.loads(line)
        if path == "/init_weights_update_group" and "refuse" in sys.argv:
            print(json.dumps(["refused"]), flush=True)
        else:
            print(json.dumps([engine.answer(path, body)]), flush=True)


if __name__ == "__main__":
    main()
