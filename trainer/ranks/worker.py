"""One rank: executes rank 0's commands, in order."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from services.chassis.rpc.clients import weights_channel
from trainer import commands
from trainer.algorithms.base import make_algorithm
from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.checkpoint_files import rows_of_part
from trainer.checkpoint.shard_writer import ShardWriter
from trainer.config import TrainerConfig
from trainer.host_copy import HostCopy, copy_stream
from trainer.model.context_ranks import context_group
from trainer.model.load_model import DTYPES
from trainer.model.load_sharded import load_sharded, ranks_mesh
from trainer.object_path import place
from trainer.pipeline.pipeline_backend import PipelineBackend
from trainer.policy.policy import Backend, Policy
from trainer.policy.sharded_backend import ShardedBackend
from trainer.publish.bucket_plan import BucketPlan, bucket_limit, plan_buckets
from trainer.publish.bucket_writer import BucketWriter, Snapshot, WritingRank
from trainer.publish.uploader import ThreadUploader
from trainer.ranks.row_messages import RowSender


class DeviceState:
    """Host copies of the released storages; empty while the device holds them.

    HELD -> RELEASED -> HELD. Storages are moved: every view of them, in the model, in FSDP and in
    the optimizer, is valid again after `restore`, bit for bit.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    @property
    def released(self) -> bool:
        """True between `release` and `restore`."""
        return bool(self._copies)

    def release(self, tensors: Iterable[torch.Tensor]) -> int:
        """Copy the storages of `tensors` to the host and free them; the number of bytes freed.

        Idempotent, also after a `restore` that failed halfway: copies are kept until it succeeds.
        """
        if not self.released:
            storages = {
                storage.data_ptr(): storage
                for storage in (tensor.untyped_storage() for tensor in tensors)
                if storage.nbytes()
            }
            self._copies = [(storage, _to_host(storage)) for storage in storages.values()]
        for storage, _ in self._copies:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(copy.numel() for _, copy in self._copies)

    def restore(self) -> None:
        """Allocate every storage on the device again and copy its content back. Idempotent."""
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._copies = []


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    # Pinned, so that the copy back runs at the bus's full speed.
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
    return copy.copy_(_bytes(storage))


_KEEPS_STATE = (
    *(commands.Accumulate, commands.Predict, commands.Measure, commands.Discard),
    *(commands.Save, commands.Written, commands.TakeSnapshot, commands.WriteBuckets),
)
"""Commands that change nothing that a checkpoint holds."""


class Worker:
    """This rank's policy, and the execution of commands on it. Needs the process group."""

    def __init__(
        self, config: TrainerConfig, store: Store | None = None, *, waits: bool = False
    ) -> None:
        """Load the models. Collective.

        Args:
            config: of the trainer.
            store: of the commands, in which the ranks of a pipeline say that they failed.
            waits: for a `Form`, to load the models then.
        """
        torch.manual_seed(config.seed)
        self._config, self._store = config, store
        self._loaded = None if waits else _policy(config, store, config.replicas)
        self._held: dict[str, torch.Tensor] = {}
        """State in the process group before, until the present one carries out a command."""
        self._device_state = DeviceState()
        self._shard_writer = ShardWriter(copy_stream(config.device))
        self._published_copy = HostCopy(copy_stream(config.device))
        self._bucket_plan: BucketPlan | None = None
        self._bucket_writer = _bucket_writer(config, store or HashStore())
        self._row_sender = RowSender(store or HashStore())

    @property
    def bucket_plan(self) -> BucketPlan:
        """The files of a published version, and who gathers which."""
        if self._bucket_plan is None:
            backend, publish = self._policy.backend, self._config.publish
            sources, adapter = backend.published_sources(), publish.content == "adapter"
            limit = bucket_limit(sources)
            convert = backend.checkpoint_tensors
            self._bucket_plan = plan_buckets(sources, convert, limit, adapter=adapter)
        return self._bucket_plan

    @property
    def backend(self) -> Backend:
        """How the models are spread over the ranks, and what they are."""
        return self._policy.backend

    @property
    def is_idle(self) -> bool:
        """Whether it holds no models, and waits for a `Form`."""
        return self._loaded is None

    @property
    def _policy(self) -> Policy:
        assert self._loaded is not None, "waits for a process group"
        return self._loaded

    def do(self, command: commands.Command) -> dict[str, float]:
        """Execute one command; its results by name."""
        if not isinstance(command, commands.Form):
            self._held = {}
        if not isinstance(command, _KEEPS_STATE):
            self._shard_writer.hold_back()
            self._published_copy.hold_back()
        match command:
            case commands.Accumulate():
                return self._policy.accumulate(command)
            case commands.Predict():
                self._policy.predict(command)
            case commands.Measure(step=step):
                self._policy.measure(step)
            case commands.Optimize(step=step, rows=rows):
                metrics = self._policy.optimize(step)
                self._hand_over(step, rows)
                return metrics
            case commands.Discard():
                return self._policy.discard()
            case commands.Save(folder=folder):
                name = checkpoint_files.shard_name(*_place())
                self._shard_writer.start(self._policy, place(folder), name)
            case commands.Written(folder=folder):
                return {"written": float(self._shard_writer.written(place(folder)))}
            case commands.Load(folder=folder):
                checkpoint_files.load_shards(self._policy, place(folder), *_place())
            case commands.Form():
                self._take_over(command)
            case commands.Leave():
                self._drop_state()
            case commands.TakeSnapshot():
                self._take_snapshot()
            case commands.WriteBuckets():
                self._bucket_writer.start(command)
            case commands.Release():
                return {"num_bytes": self._device_state.release(self._policy.device_tensors())}
            case commands.Restore():
                self._device_state.restore()
            case commands.Exit():
                self._bucket_writer.close()
                self._row_sender.close()
                dist.destroy_process_group()
        return {}

    def _hand_over(self, step: int, rows: str) -> None:
        """Do with the values of trained tokens as rank 0 asks."""
        taken = [] if rows == "keep" else self._policy.take_rows()
        if rows == "send":
            self._row_sender.start(step, taken)

    def _take_over(self, form: commands.Form) -> None:
        """Load the models on the new group, and the state that its members hold."""
        if self._loaded is not None and not self._held:
            self._held = self._loaded.held_state()
        policy = _policy(self._config, self._store, form.replicas)
        transfer(policy, self._held, form.sources, self._config.device)
        self._loaded, self._bucket_plan = policy, None
        # Ranks may have other numbers, and some have no snapshot.
        self._forget_snapshot()
        self._bucket_writer = _bucket_writer(self._config, self._store or HashStore())

    def _drop_state(self) -> None:
        """Hold nothing of the models any more."""
        self._forget_snapshot()
        self._held, self._loaded, self._bucket_plan = {}, None, None
        self._device_state = DeviceState()
        gc.collect()  # FSDP's hooks and modules refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _take_snapshot(self) -> None:
        self._forget_snapshot()
        backend, copy = self._policy.backend, self._published_copy
        parts = copy.start(backend.published_parts(), DTYPES[self._config.dtype])
        snapshot = Snapshot(
            plan=self.bucket_plan, parts=parts, convert=backend.checkpoint_tensors, wait=copy.wait
        )
        self._bucket_writer.hold(snapshot)

    def _forget_snapshot(self) -> None:
        if self._bucket_writer.is_busy:  # it may read what would be written over
            self._published_copy = HostCopy(copy_stream(self._config.device))
        self._bucket_writer.forget()


def _bucket_writer(config: TrainerConfig, store: Store) -> BucketWriter:
    """This rank's; rank 0's files are sent by its client of the weights service."""
    connections = config.publish.weight_connections
    uploader = ThreadUploader(
        lambda: weights_channel(config, config.weights, connections),
        config.run_id,
        compress=config.publish.compress,
    )
    number = dist.get_rank() if dist.is_initialized() else 0
    rank = WritingRank(
        number=number,
        upload=uploader.upload if number else None,
        uploads=connections,
    )
    return BucketWriter(rank, store)


def _policy(config: TrainerConfig, store: Store | None, replicas: int) -> Policy:
    return Policy(_backend(config, store, replicas), config)


def _backend(config: TrainerConfig, store: Store | None, replicas: int) -> Backend:
    algorithm = make_algorithm(config)
    if config.backend == "pipeline":
        return PipelineBackend(config, algorithm, store)
    mesh = ranks_mesh(config.device, replicas)
    models = load_sharded(config, mesh, critic=algorithm.critic)
    return ShardedBackend(models, mesh, algorithm, config, context_group(config.context_parallel))


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


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
