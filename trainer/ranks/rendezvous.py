"""`python -m trainer.ranks.rendezvous --port PORT`: where the nodes of a trainer find each other.

The store of torchrun's c10d rendezvous, in a process of its own: with `--rdzv-conf is_host=0` no
training node has it, so that any of them may die.
"""

from __future__ import annotations

import argparse
import signal

from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["main"]


def main() -> None:
    """Serve the store until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    store = TCPStore(given.host, given.port, is_master=True, wait_for_workers=False)
    print(f"serving on port {store.port}", flush=True)
    signal.sigwait(signals)


if __name__ == "__main__":
    main()
