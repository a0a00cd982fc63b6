"""Redis, a trajectory manager and a weights service, and the training jobs that run on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from seamflow.trajectory.v1 import sample_service_pb2, trajectory_pb2, trajectory_service_pb2
from seamflow.weights.v1 import weight_service_pb2
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from bench.harness import processes
from bench.harness.processes import Server
from bench.harness.redis_process import free_port
from services.lib.weight_files.folder_names import folder_name
from tests.chaos.calls import Caller, call_retrying
from tests.chaos.store.rig import Setting, rules
from tests.chaos.trainer.checker import History
from tests.chaos.trainer.gang import Gang, command
from tests.chaos.trainer.samples import GROUP_SIZE, GROUPS_PER_STEP, recorded_groups
from tests.lib.trained_samples import steps_with_samples
from tests.lib.trainer.support import make_model

STEPS = 24
"""Optimizer steps of every job."""
_SPARE_STEPS = 3
"""Recorded in addition: a trainer that loses samples must be able to continue."""
_RECORDED_STALENESS = 63
"""All of a recording is admitted at once, and no version is too old for any step."""
_FSYNC_MILLISECONDS = 10
"""Of Redis, beyond the disk's: commits take a share of a step, and kills fall into them."""
_PAGE = 1000
_SETTINGS = {
    "drain-seconds": "0",
    "admin-port": "-1",
    "algorithm.name": "grpo",
    "dtype": "float32",
    "optimizer.learning-rate": "1e-3",
    "batch.micro-batch-tokens": "60",
    "checkpoint.every": "1",
    # Two may be taken away, as the control with an older checkpoint does.
    "checkpoint.keep": "3",
}
_SWITCHES = ("--exit-when-finished", "--resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run, over all lives of its trainer."""

    rig: Rig
    """The services it uses."""
    run_id: str
    """Its name."""
    folder: Path
    """Checkpoints, metrics and the trainer's log."""
    flags: tuple[str, ...]
    """Additional settings."""

    def life(self, world_size: int, module: str = "trainer") -> Gang:
        """A trainer that resumes from the newest checkpoint, not started."""
        settings = {
            **_SETTINGS,
            "run-id": self.run_id,
            "num-steps": str(STEPS),
            "model": str(self.rig.model),
            "checkpoint.folder": str(self.checkpoints),
            "tracking.metrics-file": str(self._metrics_file),
            "trajectory-manager": self.rig.manager.address,
            "weights": self.rig.weights.address,
        }
        flags = [f"--{name}={value}" for name, value in settings.items()]
        return Gang(command(module, world_size, [*flags, *_SWITCHES, *self.flags]), self.folder)

    @property
    def checkpoints(self) -> Path:
        """Where they are written."""
        return self.folder / "checkpoints"

    @property
    def newest_step(self) -> int:
        """Newest step with a checkpoint; 0 for none."""
        return max(self.checkpoint_steps(), default=0)

    def checkpoint_steps(self) -> list[int]:
        """Steps with a checkpoint, in order."""
        found = self.checkpoints.glob("step_*")
        return sorted(int(path.name.removeprefix("step_")) for path in found)

    def checkpoint(self, step: int) -> Path:
        """Where that of a step is."""
        return self.checkpoints / f"step_{step:09d}"

    def newest(self) -> weight_service_pb2.Manifest:
        """The newest weights; version 0 of step 0 if none were published."""
        request = weight_service_pb2.GetManifestRequest(run_id=self.run_id)
        with grpc.insecure_channel(self.rig.weights.address) as channel:
            answer = call_retrying(WeightServiceStub(channel).GetManifest, request)
        manifest: weight_service_pb2.Manifest = answer.manifest
        return manifest

    def published(self) -> Path:
        """Where the newest weights are."""
        version = folder_name(self.newest().weight_version)
        return self.rig.weights_folder / self.run_id / "policy" / version

    def caller(self) -> AbstractContextManager[Caller]:
        """Calls at the manager about this run."""
        return Caller.at(self.rig.manager.address, self.run_id)

    def history(self) -> History:
        """What became of the run."""
        lines = steps_with_samples(self._metrics_file)
        with self.caller() as caller:
            committed = {
                entry.sample.sample_id: entry.committed_step
                for entry in listed_samples(caller)
                if entry.committed_step
            }
        return History(
            trained=[(line["step"], line["sample_ids"]) for line in lines],
            committed=committed,
            losses=[line["loss"] for line in lines if "loss" in line],
        )

    def step_times(self) -> list[float]:
        """When each step was done, seconds since 1970."""
        lines = self._metrics_file.read_text().splitlines()
        return [float(json.loads(line)["time"]) for line in lines]

    @property
    def _metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """The services that all jobs share; they are not killed here."""

    setting: Setting
    """Where things go, and the bars for people."""
    manager: Server
    """Trajectory manager."""
    weights: Server
    """Weights service."""
    weights_folder: Path
    """Its versions."""
    model: Path
    """What every job starts from."""

    def recorded(self, name: str, *flags: str) -> Job:
        """A job whose samples are all there: the same ones for every job."""
        job = self.live(name, *flags, max_staleness=_RECORDED_STALENESS)
        groups = recorded_groups(self.setting.seed, STEPS + _SPARE_STEPS)
        request = trajectory_service_pb2.RecordGroupsRequest(run_id=name, groups=groups)
        with job.caller() as caller:
            call_retrying(caller.trajectories.RecordGroups, request, timeout=60.0)
        return job

    def live(self, name: str, *flags: str, max_staleness: int) -> Job:
        """A job whose samples are still to be written."""
        folder = self.setting.part(name).folder
        job = Job(rig=self, run_id=name, folder=folder, flags=flags)
        config = rules(group_size=GROUP_SIZE, groups_per_step=GROUPS_PER_STEP)
        config.max_staleness = max_staleness
        # Old tokens are masked rather than dropped: every group must end in a step.
        config.staleness_policy = trajectory_pb2.STALENESS_POLICY_MASK
        with job.caller() as caller:
            caller.create_run(config)
        return job


@contextmanager
def rig(setting: Setting) -> Iterator[Rig]:
    """Start the services; end them afterwards."""
    folder = setting.part("services").folder
    redis_server = processes.redis_server(folder, fsync_milliseconds=_FSYNC_MILLISECONDS)
    url = processes.redis_url(redis_server)
    weights_folder = setting.folder / "weights"
    with ExitStack() as stack:
        stack.enter_context(redis_server)
        yield Rig(
            setting=setting,
            manager=stack.enter_context(processes.manager(folder, url)),
            weights=stack.enter_context(_weights_service(folder, url, weights_folder)),
            weights_folder=weights_folder,
            model=make_model(setting.folder / "model"),
        )


def listed_samples(caller: Caller) -> Iterator[sample_service_pb2.ListedSample]:
    """The samples of all closed rollouts, oldest first."""
    token = ""
    while True:
        request = sample_service_pb2.ListSamplesRequest(
            run_id=caller.run_id, page_size=_PAGE, page_token=token
        )
        page = call_retrying(caller.samples.ListSamples, request, timeout=60.0)
        yield from page.samples
        token = page.next_page_token
        if not token:
            return


def _weights_service(folder: Path, redis_url: str, weights_folder: Path) -> Server:
    port = free_port()
    settings = {
        "SEAMFLOW_WEIGHTS_PORT": str(port),
        "SEAMFLOW_WEIGHTS_ADMIN_PORT": "-1",
        "SEAMFLOW_WEIGHTS_REDIS_URL": redis_url,
        "SEAMFLOW_WEIGHTS_FOLDER": str(weights_folder),
    }
    command = processes.python("services.weights")
    return Server(f"weights-{port}", command, folder, processes.environment(settings), port)
