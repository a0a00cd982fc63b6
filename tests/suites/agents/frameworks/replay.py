"""Sends recorded requests again, to another system."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lib.rollout.http_gateway.support import World
from tests.suites.agents.frameworks.teacher import TeacherServer, parsed
from tools.provenance import ROOT

FOLDER = ROOT / "tests" / "lib" / "rollout" / "http_gateway" / "requests"
"""One file for each client: its requests in their order, and the answer to each."""


@dataclass(frozen=True, slots=True)
class Replied:
    """The reply to one request."""

    status: int
    reply: Mapping[str, Any]
    """Its body; of a stream the event that has the fields of seamflow."""
    has_answers: bool
    """Whether answers of the policy were sent back in it."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields of seamflow."""
        found: Mapping[str, Any] = self.reply.get("response", self.reply)["seamflow"]
        return found


def recorded_requests(name: str) -> list[dict[str, Any]]:
    """What a client has sent: path, body, the answer that was said, and its turn."""
    requests: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return requests


def num_with_answers(requests: Sequence[Mapping[str, Any]]) -> int:
    """Requests that send answers of the policy back."""
    return sum(_has_answers(each) for each in requests)


async def replayed(
    requests: Sequence[Mapping[str, Any]], found: World, server: TeacherServer
) -> list[Replied]:
    """The replies to a client's requests in a new rollout; ids of turns are those of this run."""
    rollout = await found.start()
    found.rollout = rollout
    headers = {"authorization": f"Bearer {rollout['credential']}"}
    turn_ids: dict[str, str] = {}
    replies = []
    for request in requests:
        text = json.dumps(request["body"])
        for before, now in turn_ids.items():
            text = text.replace(before, now)
        server.said = request.get("said", "")
        url = f"{found.url}/rollouts/{rollout['rollout_id']}{request['path']}"
        async with found.http.post(url, json=json.loads(text), headers=headers) as response:
            reply = _reply(response.content_type, await response.text())
        if response.status != 200:
            replies.append(Replied(response.status, reply, has_answers=False))
            continue
        replies.append(Replied(response.status, reply, _has_answers(request)))
        turn_ids[request["turn_id"]] = replies[-1].fields["turn_id"]
    return replies


def _reply(content_type: str, text: str) -> dict[str, Any]:
    lines = [text] if content_type == "application/json" else text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if '"seamflow"' in line]
    reply: dict[str, Any] = json.loads((data or lines)[-1])
    return reply


def _has_answers(request: Mapping[str, Any]) -> bool:
    messages = parsed(request["path"], request["body"]).messages
    return any(message["role"] == "assistant" for message in messages)
