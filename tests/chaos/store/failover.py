"""Failovers in `replicated`: the master is killed, or cut off together with its clients."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from random import Random

from seamflow.trajectory.v1 import trajectory_pb2

from bench.harness import processes
from bench.harness.processes import Child
from bench.report import percentile
from tests.chaos.store.checker import Verdict
from tests.chaos.store.rig import Outcome, Setting, under_load
from tests.chaos.store.sentinel import SAFE, Sentinels

_CALM_SECONDS = (0.5, 1.5)
_CUT_SECONDS = 300.0
_LEASE_SECONDS = 300.0


def kill_master(setting: Setting, kills: int = 10) -> Outcome:
    """Kill the master under load, let the Sentinels choose another, bring the old one back.

    After each the Sentinels also replace a master that lives: the slow are taken for dead.
    """
    random, recoveries = Random(setting.seed), []
    folder = setting.part("servers").folder
    sentinels = Sentinels(folder, SAFE)
    manager = processes.manager(setting.folder, sentinels.url, durability="replicated", replicas=2)
    replicated = trajectory_pb2.DURABILITY_REPLICATED
    with under_load(
        setting,
        redis=sentinels,
        manager=manager,
        durability=replicated,
        lease_seconds=_LEASE_SECONDS,
    ) as rig:
        for _ in setting.progress.track(range(kills), description="SIGKILL of the master"):
            time.sleep(random.uniform(*_CALM_SECONDS))
            master, read = sentinels.master(), rig.log_size()
            killed = time.monotonic()
            master.kill()
            sentinels.wait_for_other_than(master)
            # A store that waits for every replica needs this one too.
            master.start()
            recoveries.append(rig.first_ack(read, killed) - killed)
            sentinels.wait()
            sentinels.promote_another()
            sentinels.wait()
        verdict = rig.finish()
    return Outcome(
        verdict=verdict,
        figures={
            "sentinel_failovers": float(2 * kills),
            "sentinel_tokens_lost": float(verdict.tokens_lost),
            "recovery_sentinel_p95_s": percentile(recoveries, 0.95),
        },
        raw={"recovery_sentinel_s": recoveries},
    )


def cut_master(setting: Setting) -> Outcome:
    """Cut the master off from its replicas and the Sentinels, but not from its clients."""
    if not can_cut():
        setting.progress.console.print("partition skipped: needs `unshare --net` and iptables")
        return Outcome()
    verdict, refused = _cut(setting, "replicated")
    figures = {"partition_tokens_lost": float(verdict.tokens_lost), "partition_refused_s": refused}
    return Outcome(verdict=verdict, figures=figures)


def unsafe_cut(setting: Setting) -> Verdict:
    """The same in `fast` on servers as they come: the isolated side goes on and loses it all."""
    return _cut(setting, "fast")[0]


def can_cut() -> bool:
    """Whether a network namespace of our own and its packet filter are to be had."""
    if not (shutil.which("unshare") and shutil.which("iptables")):
        return False
    tried = subprocess.run([*_alone(), "iptables", "-L", "-n"], capture_output=True, check=False)
    return tried.returncode == 0


def _cut(setting: Setting, durability: str) -> tuple[Verdict, float]:
    """Run `partition.py` in a network of its own; its verdict, and seconds to the refusal."""
    result = setting.folder / "result.json"
    command = processes.python(
        "tests.chaos.store.partition", "--folder", str(setting.folder), "--seed", str(setting.seed),
        "--durability", durability, "--result", str(result),
    )  # fmt: skip
    plain = processes.environment()
    bar = setting.progress.add_task(f"the master is cut off, {durability}", total=None)
    with Child("partition", [*_alone(), *command], setting.folder, plain) as child:
        limit = time.monotonic() + _CUT_SECONDS
        while child.running and time.monotonic() < limit:
            time.sleep(0.1)
    if not result.exists():
        raise RuntimeError(f"the partition failed:\n{child.log.read_text()[-3000:]}")
    setting.progress.update(bar, total=1, completed=1)
    found = json.loads(result.read_text())
    return Verdict(**found["verdict"]), float(found["refused_s"])


def _alone() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--net", *as_root]
