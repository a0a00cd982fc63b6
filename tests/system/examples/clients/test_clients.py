"""The clients of examples/clients: short, complete, and the one in Node against a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from seamflow.errors import FieldViolation, to_status

from services.launcher.report.summary import read_token_log
from tests.lib.sdk.support import TOKENS, Gateway, serving

ROOT = Path(__file__).parents[4]
CLIENTS = ROOT / "examples" / "clients"
SOURCES = [CLIENTS / "node" / "agent.js", CLIENTS / "go" / "agent.go", CLIENTS / "cpp" / "agent.cc"]
MAX_LINES = 120
PARTS = (
    "LeaseRollouts",
    "RequestId",
    "Generate",
    "ResumeFromOffset",
    "ExtendRollouts",
    "LeaseDuration",
    "FinishRollout",
    "ErrorInfo",
    "BadRequest",
    "RetryInfo",
    "Unavailable",
    "Aborted",
    "Authorization",
    "RunEnded",
    "MaxMessageSize",
)
"""What every client has to use, as words without case and separators."""
SYNONYMS = {
    "MaxMessageSize": ("maxreceivemessagelength", "maxcallrecvmsgsize", "setmaxreceivemessagesize")
}
REFUSAL = "sampling.temperature is -1.0: must be at least 0"


def plain(text: str) -> str:
    """Without case, separators and signs."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def lacks(source: str) -> list[str]:
    """The parts that a source does not use."""
    text = plain(source)
    return [p for p in PARTS if not any(word in text for word in SYNONYMS.get(p, (plain(p),)))]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.suffix)
def test_a_client_is_short_and_carries_the_duties_of_one(source: Path) -> None:
    """At most 120 lines, with leases, resumption, back-off and decoded errors."""
    text = source.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert lacks(text) == []


def test_a_client_without_a_duty_is_noticed() -> None:
    """Negative control."""
    text = SOURCES[0].read_text(encoding="utf-8")
    assert lacks(text.replace("ExtendRollouts", "")) == ["ExtendRollouts"]


def test_the_contract_lists_the_duties() -> None:
    """A stranger reads them at the head of the service."""
    contract = ROOT / "protos" / "seamflow" / "rollout" / "v1" / "rollout_service.proto"
    head = contract.read_text(encoding="utf-8").partition("\npackage ")[0]
    words = ("deadline", "authorization", "UNAVAILABLE", "RetryInfo", "resume_from_offset")
    assert [
        word for word in (*words, "TurnEnd", "lease_duration", "64 MiB") if word not in head
    ] == []


def test_the_readme_tells_of_every_client() -> None:
    """How each is installed, generated and run."""
    told = (CLIENTS / "README.md").read_text(encoding="utf-8")
    assert [
        p for p in ("node agent.js", "go/agent", "cpp/agent", "test-clients") if p not in told
    ] == []


class RefusingGateway(Gateway):
    """Refuses a negative temperature as gateways do; the run ends with its first rollout."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Refuse, or answer."""
        if request.sampling.temperature < 0:
            context.set_trailing_metadata((("grpc-status-details-bin", refusal()),))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, REFUSAL)
        async for response in super().Generate(request, context):
            yield response

    async def FinishRollout(self, request: Any, context: Any) -> Any:
        """Close the rollout, and the run."""
        self.ended = True
        return await super().FinishRollout(request, context)


def refusal() -> bytes:
    """Details of a refused temperature."""
    violation = FieldViolation("sampling.temperature", "")
    code = grpc.StatusCode.INVALID_ARGUMENT
    return to_status(code, REFUSAL, "INVALID_FIELD", violations=[violation]).SerializeToString()


needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (CLIENTS / "node" / "node_modules").is_dir(),
    reason="no node, or no node_modules: npm install in examples/clients/node",
)


@needs_node
async def test_the_node_client_works_on_rollouts_until_the_run_ends(tmp_path: Path) -> None:
    """Streams break at a server and on purpose; each token is received once, in order."""
    gateway = RefusingGateway(breaks=[6], payloads=['{"start": 3, "calls": [5, 2]}'])
    log = tmp_path / "received.jsonl"
    async with serving(gateway.added()) as address, asyncio.timeout(60):
        process = await asyncio.create_subprocess_exec(
            *("node", str(SOURCES[0]), address, "demo"),
            env={**os.environ, "TOKEN": "secret", "TOKEN_LOG": str(log), "CONCURRENCY": "1"},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
    assert process.returncode == 0
    said = json.loads(out)
    assert said["refusal"] == {
        "code": 3,
        "reason": "INVALID_FIELD",
        "fields": ["sampling.temperature"],
        "text": REFUSAL,
    }
    assert (said["rollouts"], said["failed"], said["resumed"]) == (1, 0, 2)
    assert gateway.offsets[:2] == [0, 6]
    assert gateway.offsets[2] == 0
    (finished,) = gateway.finished
    assert 0 <= finished.rewards.rewards[0].value <= 1
    assert set(gateway.credentials) == {"credential of rollout-0"}
    second = gateway.generated[-1].messages.messages
    assert [message.role for message in second] == ["user", "assistant", "user"]
    assert second[0].content[0].text == "at 03 up to 05"
    for turn in read_token_log(log).values():
        received = [turn[offset] for offset in range(len(TOKENS))]
        assert [[token.token_id for token in tokens] for tokens in received] == [
            [t] for t in TOKENS
        ]
