"""The comparison again on the real control plane: the same settings, emulated and simulated.

How fast emulated time may pass is a matter of what the control plane does in a second of this
machine: a run is only valid while it takes at most half a core.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

from bench.sim.comparison import Row
from bench.sim.emulation.prompts import Emulation
from bench.sim.emulation.rig import emulate
from bench.sim.simulator.simulation import Setting, simulate

MOST_CORES = 0.5
"""Of the control plane, in a valid run."""
_TURNS_PER_SECOND = 36.0
_ROLLOUTS_PER_SECOND = 16.0
"""Of this machine, what the control plane bears with half a core."""
_BURSTS_PER_SECOND = 10.0
"""The same where all rollouts of a batch begin at once, and the step waits for the last of them."""
_FASTEST = 8.0
"""Beyond it the milliseconds of a call are no longer small beside emulated work."""
_SAFELY = 0.9
"""Of the most it bears: what a run is slowed down to that took too much."""
_THINNING = 16
"""Tokens of the model that a recorded one stands for."""
_ROOT = Path(__file__).parents[3]
_PACKAGES = ("bench", "rollout", "scheduler", "sdk", "services", "trainer", "trajectory_manager")
_SAMPLE = 64
"""Groups that a workload's mean number of turns is taken of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One mode on one workload, on both."""

    simulated: Row
    """In virtual time."""
    emulated: Row
    """On the real control plane."""
    control_plane_cores: float
    """It took so many."""
    speed: float
    """Emulated seconds in a second."""

    @property
    def is_valid(self) -> bool:
        """Whether the control plane left the machine enough room to be emulated on."""
        return self.control_plane_cores <= MOST_CORES

    @property
    def deviation(self) -> float:
        """Simulated throughput relative to the emulated, less 1."""
        simulated, emulated = self.simulated.result, self.emulated.result
        return simulated.rollouts_per_second / emulated.rollouts_per_second - 1


def pair(setting: Setting) -> Pair:
    """Run `setting` on both; minutes. Where emulated time passed too fast, once more and slower."""
    simulated = Row(setting=setting, result=simulate(setting))
    first = _pair(simulated, emulation(setting, simulated.result.rollouts_per_second))
    if first.is_valid:
        return first
    slower = first.speed * _SAFELY * MOST_CORES / first.control_plane_cores
    return _pair(simulated, Emulation(speed=slower, thinning=_THINNING))


def kept(folder: Path | None, setting: Setting) -> Pair:
    """`pair`, or what an earlier call left of it in `folder`.

    Only valid runs are left there, and only the same code takes them.
    """
    if folder is None:
        return pair(setting)
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(repr(setting).encode() + _code()).hexdigest()[:16]
    file = folder / f"{setting.workload.name}-{setting.mode.name.replace(' ', '-')}-{digest}.pickle"
    if file.exists():
        known: Pair = pickle.loads(file.read_bytes())  # noqa: S301 -- written below
        return known
    found = pair(setting)
    if found.is_valid:
        partial = file.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(found))
        partial.replace(file)
    return found


@cache
def _code() -> bytes:
    """A digest of all that runs."""
    digest = hashlib.sha256()
    for file in sorted(file for package in _PACKAGES for file in (_ROOT / package).rglob("*.*")):
        if file.suffix in (".py", ".lua", ".toml"):
            digest.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes())
    return digest.digest()


def _pair(simulated: Row, fast: Emulation) -> Pair:
    emulated = asyncio.run(emulate(simulated.setting, fast))
    return Pair(
        simulated=simulated,
        emulated=Row(setting=simulated.setting, result=emulated.result),
        control_plane_cores=emulated.control_plane_cores,
        speed=fast.speed,
    )


def emulation(setting: Setting, rollouts_per_second: float) -> Emulation:
    """As fast as the control plane is likely to bear."""
    workload = setting.workload
    plans = (plan for number in range(_SAMPLE) for plan in workload.group(0, number))
    turns = fmean(len(plan.turns) for plan in plans)
    at_once = setting.mode.admission == "published"
    most = _BURSTS_PER_SECOND if at_once and turns == 1 else _ROLLOUTS_PER_SECOND
    speed = min(most, _TURNS_PER_SECOND / turns) / rollouts_per_second
    return Emulation(speed=min(speed, _FASTEST), thinning=_THINNING)


def shortened(setting: Setting) -> Setting:
    """Fewer steps: where each waits for the one before, they are alike from the first on."""
    if setting.mode.admission == "published":
        return replace(setting, warm_up=1, steps=1)
    return replace(setting, warm_up=3, steps=2)
