"""Logs: JSON lines with the context of the call, and nothing secret."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from seamflow.channel import connect
from seamflow.credentials import Credentials
from seamflow.rollout.v1 import rollout_service_pb2, rollout_service_pb2_grpc
from seamflow.stubs import async_stub

from tests.lib.chassis.support import CANARY, demo_process

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def _logs_of_one_call(folder: Path) -> str:
    """Everything a process with secrets logs, at its most talkative, around one call."""
    secrets = {"SEAMFLOW_DEMO_TOKEN": CANARY, "SEAMFLOW_DEMO_PASSWORD": CANARY}
    with demo_process(folder, "--log-level=debug", "--instance=b", **secrets) as demo:
        async with connect(demo.target, Credentials(token=CANARY)) as channel:
            stub = async_stub(rollout_service_pb2_grpc.RolloutServiceStub, channel)
            parent = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),)
            request = rollout_service_pb2.StartRolloutRequest(
                rollout_id="a", labels={"secret": CANARY}
            )
            await stub.StartRollout(request, metadata=parent)
        demo.process.send_signal(signal.SIGTERM)
        return demo.process.communicate()[0]


async def test_a_call_is_logged_with_its_context_and_no_secret(tmp_path: Path) -> None:
    """Every line is JSON and names its writer; a call adds ids, code and duration, no content."""
    logs = await _logs_of_one_call(tmp_path)
    assert CANARY not in logs
    lines: list[dict[str, Any]] = [json.loads(line) for line in logs.splitlines()]
    for line in lines:
        assert {"ts", "level", "msg", "service", "version", "instance"} <= line.keys()
    call = next(line for line in lines if line["msg"] == "call")
    assert (call["code"], call["trace_id"], call["instance"]) == ("OK", TRACE, "b")
    assert call["method"] == "/seamflow.rollout.v1.RolloutService/StartRollout"
    assert {"request_id", "span_id", "duration_ms", "peer"} <= call.keys()
