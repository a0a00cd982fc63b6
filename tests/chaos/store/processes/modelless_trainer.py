"""A trainer without a model, killed in mid-step.

A step is leased, "trained", written as a durable checkpoint that names its samples, and committed.
The newest checkpoint says where the next start goes on, exactly as in the real trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from random import Random

from google.protobuf.duration_pb2 import Duration
from seamflow.errors import SeamflowError
from seamflow.trajectory.v1 import sample_service_pb2

from tests.chaos.calls import Caller, call_retrying
from tests.chaos.store.history import Log

REFUSED = "refused.jsonl"
"""What the store refused the trainer, in the folder of its checkpoints."""

_WAIT_SECONDS = 1
_PHASE_SECONDS = 0.05


def committed_steps(folder: Path) -> dict[int, list[str]]:
    """Step -> sample ids, of every durable checkpoint."""
    steps = (json.loads(path.read_text()) for path in sorted(folder.glob("step-*.json")))
    return {step["step"]: step["sample_ids"] for step in steps}


def save(folder: Path, step: int, sample_ids: list[str]) -> None:
    """Write a checkpoint that survives the crash of the machine."""
    path = folder / f"step-{step:08d}.json"
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump({"step": step, "sample_ids": sample_ids}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


class Trainer:
    """Leases, checkpoints and commits one step after the other."""

    def __init__(self, caller: Caller, checkpoints: Path, random: Random) -> None:
        """`random` decides how long each phase of a step takes."""
        self._caller = caller
        self._checkpoints = checkpoints
        self._random = random

    def train(self) -> None:
        """Train until killed; what the store refuses is written down, and begun again."""
        log = Log(self._checkpoints / REFUSED)
        while True:
            try:
                self._lead()
            except SeamflowError as error:
                log.write("abandoned", rollout_id="", reason=error.reason, message=str(error))
                time.sleep(_WAIT_SECONDS)

    def _lead(self) -> None:
        """Go on from the newest checkpoint."""
        step = max(committed_steps(self._checkpoints), default=0)
        reconcile = sample_service_pb2.ReconcileRequest(
            run_id=self._caller.run_id, step=step, trainer_id=uuid.uuid4().hex
        )
        epoch = call_retrying(self._caller.samples.Reconcile, reconcile).epoch
        while True:
            step += self._step(epoch, step + 1)

    def _step(self, epoch: int, step: int) -> int:
        """Train one step; 0 if there was nothing to train on."""
        run_id, samples = self._caller.run_id, self._caller.samples
        request = sample_service_pb2.LeaseSamplesRequest(
            run_id=run_id, epoch=epoch, step=step, wait=Duration(seconds=_WAIT_SECONDS)
        )
        sample_ids = [
            sample.sample_id for sample in call_retrying(samples.LeaseSamples, request).samples
        ]
        if not sample_ids:
            return 0
        self._work()
        save(self._checkpoints, step, sample_ids)
        self._work()
        commit = sample_service_pb2.CommitStepRequest(run_id=run_id, epoch=epoch, step=step)
        call_retrying(samples.CommitStep, commit)
        return 1

    def _work(self) -> None:
        time.sleep(self._random.uniform(0, _PHASE_SECONDS))


def main() -> None:
    """Run until killed, or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="address of the trajectory manager")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    given.checkpoints.mkdir(exist_ok=True)
    with suppress(KeyboardInterrupt), Caller.at(given.target, given.run_id) as caller:
        Trainer(caller, given.checkpoints, Random(given.seed)).train()


if __name__ == "__main__":
    main()
