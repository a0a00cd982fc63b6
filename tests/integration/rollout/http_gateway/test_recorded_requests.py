"""What frameworks and coding agents send is answered, or refused by name.

tests/lib/rollout/http_gateway/requests/*.json: of the frameworks as
`python -m tests.suites.agents.frameworks.recording` records them, of coding agents in the form of
their documentation and of the SDKs' types.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.lib.rollout.http_gateway.support import World
from tests.suites.agents.frameworks.installed import AGENTS
from tests.suites.agents.frameworks.replay import recorded_requests, replayed
from tests.suites.agents.frameworks.teacher import TeacherServer, taught_world

Taught = tuple[World, TeacherServer]


@pytest.fixture
async def taught(tmp_path: Path) -> AsyncIterator[Taught]:
    async with taught_world(tmp_path) as found:
        yield found


@pytest.mark.parametrize("name", [*AGENTS, "claude_code", "codex"])
async def test_recorded_requests_are_answered(name: str, taught: Taught) -> None:
    """A request that sends answers back continues their recorded tokens."""
    requests = recorded_requests(name)
    replies = await replayed(requests, *taught)
    for request, replied in zip(requests, replies, strict=True):
        if "refused" in request:
            assert replied.status == 400
            assert request["refused"] in str(replied.reply)
            continue
        assert replied.status == 200, replied.reply
        assert bool(replied.fields["prefix_length"]) == replied.has_answers
        checks = [replied.fields.get(check) for check in ("tool_choice", "schema")]
        assert {check["result"] for check in checks if check} <= {"valid", "unchecked"}
