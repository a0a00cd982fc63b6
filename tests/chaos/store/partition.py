"""A partition, in the network namespace this process was given.

One side is 127.0.0.1: the master, the manager, its writers and trainer. The other is 127.0.0.2: the
replicas and the Sentinels. Packets between them are dropped, without a word to anybody.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import grpc
from rich.progress import Progress
from seamflow.trajectory.v1 import trajectory_pb2

from bench.harness import processes
from tests.chaos.calls import Caller
from tests.chaos.store.checker import Verdict
from tests.chaos.store.processes import frozen_client
from tests.chaos.store.rig import RUN, Rig, Setting, under_load
from tests.chaos.store.sentinel import SAFE, Sentinels

_SIDES = ("127.0.0.1", "127.0.0.2")
_LOAD_SECONDS = 2.0
_CUT_SECONDS = 8.0
_CALL_SECONDS = 10.0
_PROBE_IDS = 1 << 30
_LOOK_SECONDS = 0.05


def run(setting: Setting, durability: str) -> tuple[Verdict, float]:
    """Cut, wait for a new master on the other side, heal; what was lost, and when refused."""
    safe = durability == "replicated"
    folder = setting.part("servers").folder
    hosts = {"master_host": _SIDES[0], "other_host": _SIDES[1]}
    sentinels = Sentinels(folder, SAFE if safe else {}, **hosts)
    manager = processes.manager(setting.folder, sentinels.url, durability=durability, replicas=2)
    wanted = trajectory_pb2.Durability.Value(f"DURABILITY_{durability.upper()}")
    with under_load(setting, redis=sentinels, manager=manager, durability=wanted) as rig:
        time.sleep(_LOAD_SECONDS)
        refused = _cut(rig, sentinels)
        if not safe:
            # What was lost must not be written again.
            rig.writers.kill()
        read, healed = rig.log_size(), time.monotonic()
        _iptables("-F")
        if not safe:
            sentinels.wait()
            return rig.count_tokens(), refused
        rig.first_ack(read, healed)
        return rig.finish(), refused


def _cut(rig: Rig, sentinels: Sentinels) -> float:
    """Cut the sides apart until the other one has a master; seconds to the first refusal.

    Where nothing is refused these are the seconds of the whole cut.
    """
    with Caller.at(rig.manager.address, RUN) as caller:
        frozen_client.start_rollout(caller, "probe")
        epoch = frozen_client.begin(caller, "probe", "probe").epoch
        writes = frozen_client.appends(caller, "probe", epoch, _PROBE_IDS)
        cut = time.monotonic()
        for source, target in itertools.permutations(_SIDES):
            _iptables("-A", "OUTPUT", "-s", source, "-d", target, "-j", "DROP")
        refused = None
        while time.monotonic() < cut + _CUT_SECONDS or not sentinels.failed_over():
            if refused is None and _is_refused(next(writes)):
                refused = time.monotonic() - cut
            time.sleep(_LOOK_SECONDS)
        return time.monotonic() - cut if refused is None else refused


def _is_refused(write: frozen_client.Call) -> bool:
    """Whether it is refused at the first try; whoever hangs is not."""
    call, request = write
    try:
        call(request, timeout=_CALL_SECONDS)
    except grpc.RpcError:
        return True
    return False


def _iptables(*arguments: str) -> None:
    subprocess.run(["iptables", *arguments], check=True)


def main() -> None:
    """Run one partition and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for logs and data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--durability", choices=("fast", "replicated"), required=True)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with Progress(disable=True) as progress:
        setting = Setting(folder=given.folder, seed=given.seed, progress=progress)
        verdict, refused = run(setting, given.durability)
    found = {"verdict": asdict(verdict), "refused_s": refused}
    given.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
