"""`python -m bench.fleet.publish`: four gloo ranks publish 0.5 billion parameters in bfloat16.

From the end of a step to the commit at a real weights service over gRPC, without a common folder,
and until rollout servers have loaded it, two embedded engines and SGLang: in buckets, and as one
process does that gathers all, writes, hashes and uploads. Beside it what the bytes alone take on
the slowest hop: the upload of one file, or its download by as many receivers at once. All share
this machine's processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.fleet.receivers import download, receivers, seconds_until_loaded
from bench.harness.processes import redis_server, redis_url, scratch, service
from bench.harness.publish_files import publish_files
from bench.harness.redis_process import free_port
from bench.report import RESULTS, Report

if TYPE_CHECKING:
    from trainer.config import TrainerConfig
    from trainer.publish.publisher import Publisher
    from trainer.ranks.rank_group import RankGroup

_RUN, _COPY_RUN = "fleet", "copy"
_RANKS, _ROUNDS = 4, 3
_SECONDS = 1800
_COPY_BYTES = 256 << 20


def main() -> None:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--rank", help="settings as JSON: be a rank")
    given = parser.parse_args()
    if given.rank:
        _rank(json.loads(given.rank))
        return
    raw = _measured()
    figures = {name: median(values) for name, values in raw.items()}
    figures["stalled_share"] = figures["stalled_seconds"] / figures["publish_seconds"]
    figures["publish_vs_slowest_hop"] = figures["publish_seconds"] / figures["upload_seconds"]
    figures["loaded_vs_slowest_hop"] = figures["loaded_seconds"] / max(
        figures["upload_seconds"], figures["download_seconds"]
    )
    figures["whole_vs_buckets"] = figures["whole_seconds"] / figures["publish_seconds"]
    figures["whole_loaded_vs_buckets"] = figures["whole_loaded_seconds"] / figures["loaded_seconds"]
    Report(bench="fleet", figures=figures, raw=raw).publish(given.out)


def _measured() -> dict[str, list[float]]:
    with scratch() as name:
        folder = Path(name)
        # A process of its own, whose memory is free again when the ranks begin.
        make = "from pathlib import Path; import bench.size.loading as p; "
        make += f"p.make_large_model(Path({str(folder / 'model')!r}))"
        subprocess.run([sys.executable, "-c", make], check=True)
        redis = redis_server(folder / "redis", fsync="everysec")
        with redis:
            weights = service(
                *("services.weights", "weights", folder),
                redis_url=redis_url(redis),
                folder=folder / "weights",
                offer_folder="false",
            )
            with weights, ExitStack() as stack:
                made = receivers(folder, folder / "model", weights.address, _RUN)
                servers = [stack.enter_context(server) for server in made.values()]
                print(f"receivers: {', '.join(made)}", flush=True)
                return _run_ranks(folder, weights.address, [each.address for each in servers])


def _run_ranks(folder: Path, weights: str, loading: Sequence[str]) -> dict[str, list[float]]:
    settings = {
        "model": str(folder / "model"),
        "weights": weights,
        "out": str(folder / "out"),
        "receivers": ",".join(loading),
    }
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "bench.fleet.publish", "--rank", json.dumps(settings)]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **meeting, "RANK": str(rank), "WORLD_SIZE": str(_RANKS)}
        )
        for rank in range(_RANKS)
    ]
    try:
        codes = [rank.wait(_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    found: dict[str, list[float]] = json.loads((folder / "out/figures.json").read_text())
    return found


def _rank(settings: dict[str, str]) -> None:
    from trainer.config import TrainerConfig
    from trainer.ranks import rank_group
    from trainer.ranks.command_channel import worker_loop
    from trainer.ranks.process_group import join

    out = Path(settings["out"])
    config = TrainerConfig.model_validate(
        {
            "run_id": _RUN,
            "model": settings["model"],
            "weights": settings["weights"],
            "dtype": "bfloat16",
            "checkpoint": {"folder": out / "checkpoints"},
        }
    )
    worker = _whole_worker()
    if os.environ["RANK"] == "0":
        rank_group.Worker = worker  # type: ignore[attr-defined]
        asyncio.run(_lead(config, out, settings["receivers"].split(",")))
        return
    ranks = join(config)
    worker_loop(ranks, worker(config, ranks.store), _SECONDS)


def _whole_worker() -> Any:
    """A rank that gathers all on rank 0 for a `Discard`: what there is nothing of here."""
    import torch
    import torch.distributed as dist

    from trainer.commands import Command, Discard
    from trainer.ranks.worker import Worker

    class WholeWorker(Worker):
        gathered: dict[str, torch.Tensor]

        def do(self, command: Command) -> dict[str, float]:
            if not isinstance(command, Discard):
                return super().do(command)
            self.gathered = {}
            for name, parameter in self._policy.backend.parameters.items():
                whole = parameter.detach().full_tensor()  # type: ignore[attr-defined]
                if dist.get_rank() == 0:
                    self.gathered[name] = whole.to(torch.bfloat16)
            return {}

    return WholeWorker


async def _lead(config: TrainerConfig, out: Path, loading: Sequence[str]) -> None:
    from services.chassis.rpc.clients import channel
    from trainer.publish.publisher import Publisher
    from trainer.ranks.rank_group import RankGroup

    ranks, raw = RankGroup(), dict[str, list[float]]()
    await ranks.start(config)
    async with channel(config, config.weights) as opened:
        publisher = Publisher(opened, config.run_id, config.model, config.upload_folder)
        for number in range(_ROUNDS):
            found = await _in_buckets(ranks, publisher, 2 * number + 1)
            waited = await seconds_until_loaded(loading, 2 * number + 1)
            found["loaded_seconds"] = found["publish_seconds"] + waited
            found |= await _at_once(ranks, opened, config, out, 2 * number + 2)
            waited = await seconds_until_loaded(loading, 2 * number + 2)
            found["whole_loaded_seconds"] = found["whole_seconds"] + waited
            num_bytes = found.pop("num_bytes")
            parts = num_bytes / _COPY_BYTES
            for hop, seconds in (await _plain_copy(opened, out, number + 1, len(loading))).items():
                found[f"{hop}_seconds"] = parts * seconds
            found["gigabytes"] = num_bytes / 1e9
            for name, value in found.items():
                raw.setdefault(name, []).append(value)
            print(json.dumps(found), flush=True)
    (out / "figures.json").write_text(json.dumps(raw))
    await ranks.stop()


async def _in_buckets(ranks: RankGroup, publisher: Publisher, step: int) -> dict[str, float]:
    from trainer.publish.snapshot_weights import Attempt

    began, written, files = time.monotonic(), [], Attempt.files

    async def noting(attempt: Attempt) -> Any:
        async for file in files(attempt):
            written.append(file)
            yield file

    Attempt.files = noting  # type: ignore[method-assign, assignment]
    weights = await ranks.snapshot()
    stalled = time.monotonic() - began
    await publisher.publish(weights, step=step, parent=0, epoch=1)
    seconds = time.monotonic() - began
    Attempt.files = files  # type: ignore[method-assign]
    return {
        "publish_seconds": seconds,
        "stalled_seconds": stalled,
        "num_bytes": float(sum(file.num_bytes for file in written)),
        "buckets": float(len(written)),
        "buckets_held_max": max(file.peak_bytes for file in written)
        / max(file.num_bytes for file in written),
    }


async def _at_once(
    ranks: RankGroup, opened: Any, config: TrainerConfig, out: Path, step: int
) -> dict[str, float]:
    """Gather the whole, write it, hash it by reading it again, upload and commit."""
    from safetensors.torch import save_file

    from trainer.commands import Discard

    began, path = time.monotonic(), out / "model.safetensors"
    await ranks.do(Discard())
    gathered = time.monotonic() - began
    worker: Any = ranks.rank0.worker
    await asyncio.to_thread(save_file, worker.gathered, path)
    worker.gathered = {}
    await publish_files(opened, config.run_id, step, [path])
    path.unlink()
    return {"whole_seconds": time.monotonic() - began, "whole_stalled_seconds": gathered}


async def _plain_copy(opened: Any, out: Path, step: int, receivers: int) -> dict[str, float]:
    """Seconds of an upload alone, of one file that exists already, and of its downloads at once."""
    path = out / "copy.safetensors"
    path.write_bytes(os.urandom(_COPY_BYTES))
    began = time.monotonic()
    version = await publish_files(opened, _COPY_RUN, step, [path])
    uploaded = time.monotonic()
    downloads = [download(opened, _COPY_RUN, version) for _ in range(receivers)]
    await asyncio.gather(*downloads)
    path.unlink()
    return {"upload": uploaded - began, "download": time.monotonic() - uploaded}


if __name__ == "__main__":
    main()
