"""ProcessService: what this process waits for, for `seamflow why-stuck` and the launcher."""

from __future__ import annotations

import time
from typing import Any

from seamflow import waits
from seamflow.common.v1 import process_service_pb2 as pb
from seamflow.common.v1.process_service_pb2_grpc import ProcessServiceServicer
from seamflow.durations import to_duration


class ProcessServicer(ProcessServiceServicer):
    def __init__(self, process: str, instance: str) -> None:
        self._process, self._instance = process, instance

    async def GetWaits(self, request: pb.GetWaitsRequest, context: Any) -> pb.GetWaitsResponse:  # noqa: N802
        now = time.monotonic()
        return pb.GetWaitsResponse(
            process=self._process,
            instance=self._instance,
            waits=[
                pb.Wait(reason=each.reason, cure=each.cure, duration=to_duration(now - each.since))
                for each in waits.current()
            ],
        )
