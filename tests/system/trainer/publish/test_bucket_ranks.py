"""Four real ranks write what they publish, bucket by bucket, beside training."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from seamflow.channel import connect

from services.lib.weight_files.shard_chunks import encode_upload
from tests.lib.mostly_long import mostly_long
from tests.lib.trainer.ranks.forked_ranks import exit_codes, run_forked
from tests.lib.trainer.ranks.gang_run import Ranks, run_rank, train
from tests.lib.trainer.ranks.published_weights import write_snapshot, written_tensors
from tests.lib.trainer.support import make_model, trainer_config
from tests.system.services.weights.process import running
from trainer.checkpoint.model_folder import write_model_folder
from trainer.commands import Exit
from trainer.config import TrainerConfig
from trainer.publish import bucket_plan, uploader
from trainer.publish.attempt_messages import BucketGather, BucketsLostError
from trainer.publish.publisher import Publisher
from trainer.ranks.command_channel import Rank0, worker_loop
from trainer.ranks.process_group import join
from trainer.ranks.worker import Worker

pytestmark = pytest.mark.timeout(120)
RANKS = 4
LIMIT = 2000
MOE = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied, bfloat16": ({}, {"dtype": "bfloat16"}),
    "fused experts": ({"kind": "qwen3_moe", **MOE}, {"dtype": "bfloat16"}),
    "a pipeline": ({"num_hidden_layers": 4}, {"backend": "pipeline"}),
    "a merged adapter": ({}, {"lora__rank": 2}),
}


@pytest.mark.parametrize("kind", mostly_long(KINDS, "tied, bfloat16", "a pipeline", short=__file__))
def test_the_files_are_the_whole_model(tmp_path: Path, kind: str) -> None:
    """Bit for bit what is exported from a checkpoint, by one process that holds all of it.

    No rank holds more than two buckets. Negative control: in one bucket a rank holds all of what
    it needs from others.
    """
    sizes, settings = KINDS[kind]
    model = make_model(tmp_path / "model", **sizes)
    job = {"model": model, "steps": [1], "save_after": 1}
    small = {
        **job,
        "out": tmp_path / "small",
        "config": settings,
        "bucket_bytes": LIMIT,
    }
    large = {**job, "out": tmp_path / "large", "config": settings}
    run_forked(RANKS, run_rank, small)
    checkpoint = next((tmp_path / "small/checkpoints").glob("step_*"))
    exported = load_file(
        write_model_folder(checkpoint, model, tmp_path / "whole") / "model.safetensors"
    )
    published = written_tensors(tmp_path / "small/published")
    assert published.keys() == exported.keys()
    for name, tensor in exported.items():
        assert published[name].dtype == tensor.dtype
        assert torch.equal(published[name], tensor), name
    peaks = held(tmp_path / "small")
    assert len(peaks) > RANKS
    largest = max(path.stat().st_size for path in (tmp_path / "small/published").rglob("*.safet*"))
    assert max(peaks) <= 2 * max(largest, LIMIT)
    if kind == "tied, bfloat16":
        run_forked(RANKS, run_rank, large)
        assert max(held(tmp_path / "large")) > 2 * max(largest, LIMIT)


def held(out: Path) -> list[int]:
    """The most bytes of buckets that the owner of each file held."""
    return [each["peak_bytes"] for each in json.loads((out / "written.json").read_text())]


def with_ranks(job: dict[str, Any], lead: Callable[..., Any]) -> None:
    """A gang whose rank 0 does `lead`."""
    out = Path(job["out"])
    bucket_plan._MAX_BYTES = LIMIT
    config = trainer_config(
        run_id=job.get("run_id", "r"),
        checkpoint__folder=out / "checkpoints",
        model=Path(job["model"]),
        **job["config"],
    )
    ranks = join(config)
    worker = Worker(config, ranks.store)
    if ranks.rank:
        worker_loop(ranks, worker, grace_seconds=1.0)
        return
    rank0 = Rank0(ranks, worker)
    asyncio.run(lead(rank0, config, out))
    rank0.do(Exit())


def beside_training(job: dict[str, Any]) -> None:
    """Every rank gathers its second bucket when the step after it is trained."""
    trained, gather = Path(job["out"]) / "trained", BucketGather.gather

    def late(self: BucketGather, *given: Any) -> Any:
        deadline = time.monotonic() + 60
        while not trained.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return gather(self, *given)

    async def lead(rank0: Rank0, config: TrainerConfig, out: Path) -> None:
        ranks = Ranks(rank0)
        train(rank0, config, 1)
        await write_snapshot(await ranks.snapshot(), out / "first")
        weights = await ranks.snapshot()
        BucketGather.gather = late  # type: ignore[method-assign, assignment]
        async with weights.attempt(version=1, spool=out / "beside/weight_v000001") as attempt:
            train(rank0, config, 2)
            assert not list((out / "beside").rglob("*.safetensors"))
            trained.touch()
            _ = [each async for each in attempt.files()]
        await write_snapshot(await ranks.snapshot(), out / "second")

    with_ranks(job, lead)


@pytest.mark.long(short="tests/system/trainer/publish/test_bucket_ranks.py")
def test_training_goes_on_while_its_weights_are_gathered(tmp_path: Path) -> None:
    """The files have the weights of the snapshot, not those of the step that was trained since."""
    out = tmp_path / "out"
    out.mkdir()
    job = {"out": out, "model": make_model(tmp_path / "model"), "config": {}}
    run_forked(RANKS, beside_training, job)
    first, beside, second = (written_tensors(out / n) for n in ("first", "beside", "second"))
    assert all(torch.equal(beside[name], tensor) for name, tensor in first.items())
    assert not all(torch.equal(beside[name], tensor) for name, tensor in second.items())


def losing_a_rank(job: dict[str, Any]) -> None:
    """Rank 2 kills itself at its third bucket, or at none."""
    gather, num_gathered = BucketGather.gather, 0

    def mortal(self: BucketGather, *given: Any) -> Any:
        nonlocal num_gathered
        num_gathered += 1
        if num_gathered == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, *given)

    if os.environ["RANK"] == "2" and job["dies"]:
        BucketGather.gather = mortal  # type: ignore[method-assign, assignment]

    async def lead(rank0: Rank0, _config: TrainerConfig, out: Path) -> None:
        try:
            await write_snapshot(await Ranks(rank0).snapshot(), out)
        except BucketsLostError as error:
            (out / "lost").write_text(str(error))

    with_ranks(job, lead)


@pytest.mark.parametrize("dies", mostly_long([True, False], True, short=__file__))
def test_a_killed_rank_ends_the_attempt_at_once(tmp_path: Path, dies: bool) -> None:
    """The others notice it and go on; without the death (control) all files are there."""
    out = tmp_path / "out"
    out.mkdir()
    job = {"out": out, "model": make_model(tmp_path / "model"), "config": {}, "dies": dies}
    assert exit_codes(RANKS, losing_a_rank, job) == [0, 0, -signal.SIGKILL if dies else 0, 0]
    assert (out / "lost").exists() == dies


def sending(job: dict[str, Any]) -> None:
    """Publish to a weights service; the first part that rank 1 sends arrives damaged."""
    is_damaged = os.environ["RANK"] == "1"

    def damaging(head: Any, data: bytes) -> bytes:
        nonlocal is_damaged
        message = encode_upload(head, data)
        if not is_damaged:
            return message
        is_damaged = False
        (Path(job["out"]) / "damaged").touch()
        at = message.index(data[:64]) + 32
        return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]

    pytest.MonkeyPatch().setattr(uploader, "encode_upload", damaging)

    async def lead(rank0: Rank0, config: TrainerConfig, out: Path) -> None:
        weights = await Ranks(rank0).snapshot()
        await write_snapshot(weights, out)
        async with connect(config.weights) as channel:
            publisher = Publisher(channel, config.run_id, config.model, config.upload_folder)
            await publisher.publish(weights, step=1, parent=0, epoch=1)

    with_ranks(job, lead)


@pytest.mark.long(short="tests/system/trainer/publish/test_bucket_ranks.py")
async def test_every_rank_sends_its_own_files(tmp_path: Path, redis_url: str) -> None:
    """To a service that sees no path of theirs; what arrives damaged is sent again."""
    folder, out = tmp_path / f"service-{uuid.uuid4().hex}", tmp_path / "out"
    for each in (folder, out):
        each.mkdir()
    model = make_model(tmp_path / "model")
    async with running(folder, redis_url, "--no-offer-folder") as service:
        job = {
            "out": out,
            "model": model,
            "config": {"weights": f"127.0.0.1:{service.port}"},
            "run_id": service.trainer.run_id,
        }
        await asyncio.to_thread(run_forked, RANKS, sending, job)
        files = await service.trainer.fetch(1)
    assert (out / "damaged").exists()
    arrived = {
        k: v for n, d in files.items() if n.endswith(".safetensors") for k, v in load(d).items()
    }
    written = written_tensors(out)
    assert arrived.keys() == written.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in written.items())
    index = json.loads(files["model.safetensors.index.json"])
    assert index["weight_map"].keys() == arrived.keys()
    assert not list((out / "checkpoints/upload").rglob("*.safetensors"))
