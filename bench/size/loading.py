"""Peak memory of the host while one rank of several loads its part of a model.

The rank is real, its process group is not: collectives return at once, with any content. So what is
computed with the weights means nothing here, and what is held in memory is what a rank holds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.size.model_shapes import MODELS

_RANK, _RANKS = 3, 8
_MIB = 1 << 20
_POLL_SECONDS = 0.005
_ALLOWED_MIB = 200
"""Beside this rank's part and one block, for whatever else a process takes."""


def loading() -> dict[str, float]:
    """Of rank 3 of 8: MiB, and relative to the part, one block and 200 MiB."""
    with tempfile.TemporaryDirectory(prefix="seamflow-size-") as scratch:
        folder = Path(scratch) / "model"
        command = [sys.executable, "-m", "bench.size.loading", str(folder)]
        subprocess.run([*command, "make"], check=True)
        done = subprocess.run([*command, "load"], check=True, capture_output=True, text=True)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def make_large_model(folder: Path) -> Path:
    """Write a model of 494 million random parameters with its tokenizer; its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from bench.harness.byte_model import make_byte_model

    make_byte_model(folder)
    given = dict(MODELS["qwen2.5-0.5b"])
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def _load(folder: Path) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401 -- not measured
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trainer.config import TrainerConfig
    from trainer.model.load_sharded import empty_models, shard
    from trainer.model.load_slices import fill, folder_tensors

    dist.init_process_group("fake", store=FakeStore(), rank=_RANK, world_size=_RANKS)
    mesh = init_device_mesh("cpu", (_RANKS,))
    checkpoint = {"folder": folder / "checkpoints"}
    settings = {"run_id": "r", "model": folder, "dtype": "bfloat16", "checkpoint": checkpoint}
    config = TrainerConfig.model_validate(settings)
    before = _anonymous_mib()
    with _peak() as peak:
        policy: Any = empty_models(config).policy
        shard(policy, policy, config, mesh)
        own = dict(folder_tensors(policy, policy))
        fill(own, policy, folder, part=_RANK, num_parts=_RANKS)
    used = peak[0] - before
    with _peak() as peak:
        policy(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    whole = sum(each.numel() for each in policy.parameters()) * 4 / _MIB
    block = sum(each.numel() for each in policy.model.layers[0].parameters()) * 4 / _MIB
    return {
        "whole_mib": whole,
        "part_mib": whole / _RANKS,
        "block_mib": block,
        "load_peak_mib": used,
        "load_peak_over_whole": used / whole,
        "load_peak_share": used / (whole / _RANKS + block + _ALLOWED_MIB),
        # A forward pass gathers the embeddings, once in bfloat16 and once more to unpack them.
        "first_pass_peak_mib": peak[0] - before,
    }


@contextmanager
def _peak() -> Iterator[list[float]]:
    """The greatest anonymous memory within the block, in MiB; mapped files are not in it."""
    found, ended = [_anonymous_mib()], threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            found[0] = max(found[0], _anonymous_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield found
    finally:
        ended.set()
        watching.join()


def _anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


if __name__ == "__main__":
    _folder = Path(sys.argv[1])
    if sys.argv[2] == "make":
        make_large_model(_folder)
    else:
        print(json.dumps(_load(_folder)))
