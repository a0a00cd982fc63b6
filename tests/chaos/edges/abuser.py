"""`python -m tests.chaos.edges.abuser`: an agent that sends too much, again and again.

Arguments: the gateway's address, a name of `ABUSES`, a file that gets the codes of its calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import grpc.aio
from seamflow.channel import connect
from seamflow.common.v1.tokens_pb2 import PURPOSE_EVAL, SamplingParams
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from seamflow.stubs import async_stub

from tests.chaos.edges.world import GROWS, LOOPS, RUN_ID

BEGUN = "BEGUN"
"""First line of the file: its calls begin."""

_AT_ONCE = 4
_PAUSE_SECONDS = 0.25
_SAMPLING = SamplingParams(max_new_tokens=8, ignore_eos=True)
_MEBIBYTE = 1 << 20


def _message(size: int, role: str = "user") -> pb.Message:
    text = ("hello world and so on " * (size // 22 + 1))[:size]
    return pb.Message(role=role, content=[pb.ContentPart(type="text", text=text)])


def _say(text: str) -> pb.GenerateRequest:
    part = pb.ContentPart(type="text", text=text)
    return _request(messages=pb.Messages(messages=[pb.Message(role="user", content=[part])]))


def _own_template() -> pb.GenerateRequest:
    request = _say("hello")
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    request.messages.template_arguments_json = json.dumps({"chat_template": template})
    return request


def _talk(number: int) -> pb.Messages:
    roles = ("user", "assistant")
    messages = [_message(80, roles[i % 2]) for i in range(number - number % 2 + 1)]
    return pb.Messages(messages=messages)


def _request(**prompt: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(run_id=RUN_ID, sampling=_SAMPLING, **prompt)  # type: ignore[arg-type]


def _stop_ids(number: int) -> pb.GenerateRequest:
    request = _request(token_ids=pb.TokenIds(token_ids=[1]))
    request.sampling.stop_token_ids.extend([1] * number)
    return request


ABUSES: dict[str, Callable[[], pb.GenerateRequest]] = {
    "long_conversation": lambda: _request(messages=_talk(4000)),
    "message_of_10_mb": lambda: _request(messages=pb.Messages(messages=[_message(10**7)])),
    "messages_20000": lambda: _request(messages=_talk(20_000)),
    "own_template": _own_template,
    "template_that_loops": lambda: _say(LOOPS),
    "template_that_grows": lambda: _say(GROWS),
    "stop_ids_10m": lambda: _stop_ids(10**7),
    "prompt_of_8m_tokens": lambda: _request(token_ids=pb.TokenIds(token_ids=[1] * (8 << 20))),
    "prompt_of_1m_tokens": lambda: _request(token_ids=pb.TokenIds(token_ids=[1] * _MEBIBYTE)),
    "largest_message": lambda: _request(messages=pb.Messages(messages=[_message(_MEBIBYTE - 64)])),
}
"""Requests by name; the last two, and the first, are within the limits."""


async def _abuse(address: str, name: str, codes: Path) -> None:
    async with connect(address) as channel:
        stub = async_stub(RolloutServiceStub, channel)
        start = pb.StartRolloutRequest(run_id=RUN_ID, rollout_id="abuser", purpose=PURPOSE_EVAL)
        shown = (("authorization", f"Bearer {(await stub.StartRollout(start)).credential}"),)
        numbers = count()

        async def repeat() -> None:
            request = ABUSES[name]()
            request.rollout_id = "abuser"
            while True:
                request.turn_id = f"turn-{next(numbers)}"
                code = "OK"
                try:
                    async for _ in stub.Generate(request, metadata=shown):
                        pass
                except grpc.aio.AioRpcError as error:
                    code = error.code().name
                with codes.open("a") as file:
                    file.write(f"{code}\n")
                await asyncio.sleep(_PAUSE_SECONDS)

        codes.write_text(f"{BEGUN}\n")
        await asyncio.gather(*(repeat() for _ in range(_AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(_abuse(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
