"""`python -m trainer.ranks.rendezvous --port PORT`: where the nodes of a trainer find each other.

The store of torchrun's c10d rendezvous, in a process of its own: with `--rdzv-conf is_host=0` no
training node has it, so that any of them may die. Who reaches its port may join: nobody but the
trainer's nodes should.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from services.chassis.config.settings import ServerConfig
from services.chassis.rpc import admin


def main() -> None:
    """Serve the store until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--admin-port", type=int, default=-1, help="of /healthz; -1: none")
    given = parser.parse_args()
    asyncio.run(_serve(given.host, given.port, given.admin_port))


async def _serve(host: str, port: int, admin_port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    pages = admin.serving(ServerConfig(host=host, admin_port=admin_port), "rendezvous", _ready)
    async with pages:
        print(f"serving on port {store.port}", flush=True)
        await ended.wait()


async def _ready() -> bool:
    return True


if __name__ == "__main__":
    main()
