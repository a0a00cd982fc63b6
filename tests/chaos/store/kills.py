"""SIGKILLs under load: of the manager, of Redis, of the trainer."""

from __future__ import annotations

import time
from random import Random

import redis

from bench.harness import processes
from bench.harness.processes import Child, Server
from bench.report import percentile
from tests.chaos.store.checker import Verdict
from tests.chaos.store.processes.modelless_trainer import committed_steps
from tests.chaos.store.rig import Outcome, Rig, Setting, under_load

SLOW_FSYNC_MILLISECONDS = 20
_CALM_SECONDS = (0.1, 0.8)
_SUPERVISOR_SECONDS = 0.05
_STEP_SECONDS = 60.0
_LOOK_SECONDS = 0.01
_MEBIBYTE = 1 << 20
_PIECE_BYTES = 1 << 10
# The file holds the effects of a script: one APPEND per piece.
_APPEND_MANY = "for i = 1, ARGV[2] do redis.call('APPEND', KEYS[1], ARGV[1]) end"


def kill_manager(setting: Setting, kills: int = 50) -> Outcome:
    """Kill the only replica, and start it again as a supervisor does."""
    redis_server = processes.redis_server(setting.folder / "redis")
    manager = processes.manager(setting.folder, processes.redis_url(redis_server))
    with under_load(setting, redis=redis_server, manager=manager) as rig:
        recoveries = _strikes(rig, manager, kills, "SIGKILL of the manager")
        return Outcome(
            verdict=rig.finish(),
            figures={
                "manager_kills": kills,
                "recovery_manager_p95_s": percentile(recoveries, 0.95),
            },
            raw={"recovery_manager_s": recoveries},
        )


def kill_redis(setting: Setting, kills: int = 50) -> Outcome:
    """Kill Redis in `durable`, half of the time on a disk that is slow to fsync."""
    first, fast = _kill_one_redis(setting.part("fast-disk"), kills - kills // 2, 0)
    second, slow = _kill_one_redis(setting.part("slow-disk"), kills // 2, SLOW_FSYNC_MILLISECONDS)
    recoveries = [*fast, *slow]
    return Outcome(
        verdict=first + second,
        figures={"redis_kills": kills, "recovery_redis_p95_s": percentile(recoveries, 0.95)},
        raw={"recovery_redis_s": fast, "recovery_redis_slow_fsync_s": slow},
    )


def kill_redis_with_large_file(setting: Setting, mebibytes: int = 1024) -> Outcome:
    """Kill Redis once its append-only file is large, and time the first new acknowledgement."""
    # A rewrite would make the file smaller, and quicker to load.
    redis_server = processes.redis_server(
        setting.folder / "redis", settings={"auto-aof-rewrite-percentage": "0"}
    )
    manager = processes.manager(setting.folder, processes.redis_url(redis_server))
    with under_load(setting, redis=redis_server, manager=manager) as rig:
        _fill(setting, redis_server, mebibytes)
        recovery = _strikes(rig, redis_server, 1, f"SIGKILL of Redis with {mebibytes} MiB")
        return Outcome(
            verdict=rig.finish(),
            figures={"redis_aof_mib": mebibytes, "recovery_redis_1gb_aof_s": recovery[0]},
        )


def kill_trainer(setting: Setting, kills: int = 20) -> Outcome:
    """Kill the trainer in mid-step: leased, checkpoint written, or about to commit."""
    redis_server = processes.redis_server(setting.folder / "redis")
    manager = processes.manager(setting.folder, processes.redis_url(redis_server))
    with under_load(setting, redis=redis_server, manager=manager) as rig:
        random = Random(setting.seed)
        for _ in setting.progress.track(range(kills), description="SIGKILL of the trainer"):
            _wait_for_checkpoint(rig)
            time.sleep(random.uniform(0, 0.2))
            _strike(rig.trainer)
        return Outcome(verdict=rig.finish(), figures={"trainer_kills": kills})


def _kill_one_redis(setting: Setting, kills: int, milliseconds: int) -> tuple[Verdict, list[float]]:
    redis_server = processes.redis_server(setting.folder / "redis", fsync_milliseconds=milliseconds)
    manager = processes.manager(setting.folder, processes.redis_url(redis_server))
    label = f"SIGKILL of Redis, fsync +{milliseconds} ms"
    with under_load(setting, redis=redis_server, manager=manager) as rig:
        recoveries = _strikes(rig, redis_server, kills, label)
        return rig.finish(), recoveries


def _strikes(rig: Rig, victim: Child, kills: int, label: str) -> list[float]:
    """Kill again and again; seconds from each kill to the first acknowledgement of a new call."""
    random = Random(rig.setting.seed)
    recoveries = []
    for _ in rig.setting.progress.track(range(kills), description=label):
        time.sleep(random.uniform(*_CALM_SECONDS))
        read = rig.log_size()
        killed = _strike(victim)
        recoveries.append(rig.first_ack(read, killed) - killed)
    return recoveries


def _strike(victim: Child) -> float:
    """Kill and start again; the monotonic time of the kill."""
    killed = time.monotonic()
    victim.kill()
    time.sleep(_SUPERVISOR_SECONDS)
    victim.start()
    return killed


def _wait_for_checkpoint(rig: Rig) -> None:
    before = len(committed_steps(rig.checkpoints))
    limit = time.monotonic() + _STEP_SECONDS
    while len(committed_steps(rig.checkpoints)) == before:
        if time.monotonic() > limit:
            raise RuntimeError(f"no step in {_STEP_SECONDS:g} s, see {rig.trainer.log}")
        time.sleep(_LOOK_SECONDS)


def _fill(setting: Setting, redis_server: Server, mebibytes: int) -> None:
    """Grow the append-only file with what another run could have stored: appends of 1 KiB."""
    piece = Random(setting.seed).randbytes(_PIECE_BYTES)
    bar = setting.progress.track(range(mebibytes), description="filling the append-only file")
    with redis.Redis(port=redis_server.port) as client:
        append = client.register_script(_APPEND_MANY)
        for number in bar:
            key = f"sf:{{filler:task-{number}/0/1}}:chunks:turn-0"
            append(keys=[key], args=[piece, _MEBIBYTE // _PIECE_BYTES])
