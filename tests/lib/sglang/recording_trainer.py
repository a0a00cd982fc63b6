"""The trainer, writing down each sample that it leases: what the check of half segments reads.

One JSON line per sample: {"sample_id", "rollout_id", "token_ids", "loss_mask"}.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

import trainer.cli
from tests.lib.sglang.quickstart import LEASED
from trainer.clients.sample_client import SampleClient


class RecordingSampleClient(SampleClient):
    """Appends to the file before the trainer sees the samples."""

    async def lease(
        self, step: int, base_weight_version: int, min_groups: int = 0
    ) -> sample_pb.LeaseSamplesResponse | None:
        """See `SampleClient.lease`."""
        leased = await super().lease(step, base_weight_version, min_groups)
        checkpoints = Path(os.environ["SEAMFLOW_TRAINER_CHECKPOINT__FOLDER"])
        with (checkpoints.parent / LEASED).open("a") as file:
            for sample in leased.samples if leased is not None else ():
                record = {
                    "sample_id": sample.sample_id,
                    "rollout_id": sample.rollout_id,
                    "token_ids": np.frombuffer(sample.tokens.token_ids, "<i4").tolist(),
                    "loss_mask": np.frombuffer(sample.loss_mask, np.uint8).tolist(),
                }
                file.write(json.dumps(record) + "\n")
        return leased


if __name__ == "__main__":
    trainer.cli.SampleClient = RecordingSampleClient  # type: ignore[attr-defined]  # as imported
    trainer.cli.main()
