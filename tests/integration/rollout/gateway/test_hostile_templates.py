"""Agents cannot choose what renders their messages, nor hold up others by what they write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from bench.harness.byte_model import APPENDING, make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from tests.integration.rollout.gateway.test_turn import World
from tests.lib.rollout.gateway.support import ScriptedServer, gateway, message, scripted

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FRAGILE = "{% if messages[-1].content == 'loop' %}" + LOOPS + "{% endif %}" + APPENDING
"""Loops on one word, as the template of a model may."""

PARAMETERS: dict[str, Any] = {
    "chat_template": LOOPS,
    "tokenize": True,
    "return_tensors": "pt",
    "return_dict": True,
    "return_assistant_tokens_mask": True,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "tools": [],
    "documents": [],
    "messages": [],
    "conversation": [],
    "conversations": [],
    "padding": "max_length",
    "truncation": True,
    "max_length": 1,
    "tokenizer_kwargs": {},
    "eos_token": "x",
    "raise_exception": None,
    "self": None,
}
_NUMBERS = count()


async def test_no_parameter_of_the_library_can_be_given(tmp_path: Path) -> None:
    """They are refused by name; the template's own variables pass."""
    async with _world(tmp_path, "{{ mood }}" + APPENDING) as world:
        for name, value in PARAMETERS.items():
            error = await _refusal(world, "hello", {"mood": "sad", name: value})
            assert "template_arguments_json" in error and repr(name) in error
        await _turn(world, "hello", {"mood": "sad"})
        assert world.template.text(world.server.prompts[0]).startswith("sad<user>")


async def test_others_go_on_while_a_template_loops(tmp_path: Path) -> None:
    """Turns that never render are refused with the limit's name; meanwhile another one ends."""
    async with _world(tmp_path, FRAGILE, max_render_seconds=1.0) as world:
        looping = [asyncio.create_task(_refusal(world, "loop")) for _ in range(2)]
        other = replace(world, rollout_id="other")
        await other.start()
        await _turn(other, "hello")
        for error in await asyncio.gather(*looping):
            assert "max_render_seconds" in error and tmp_path.name in error


async def test_without_the_limit_the_turn_goes_on_rendering(tmp_path: Path) -> None:
    """Negative control: until the caller gives up, long after the limit of the other test."""
    async with _world(tmp_path, FRAGILE, max_render_seconds=4.0) as world:
        turn = asyncio.create_task(_refusal(world, "loop"))
        done, _ = await asyncio.wait([turn], timeout=2.0)
        assert not done
        await turn


@asynccontextmanager
async def _world(folder: Path, template: str, **settings: Any) -> AsyncIterator[World]:
    model, server = make_byte_model(folder, template), ScriptedServer()
    server.default_answer = [[1]]
    async with (
        scripted(server) as address,
        gateway(model, servers=(address,), **settings) as (agent, store, runs),
    ):
        world = World(agent, store, runs, server, ChatTemplate(model))
        await world.start()
        yield world


async def _turn(world: World, text: str, arguments: dict[str, Any] | None = None) -> None:
    given = pb.Messages(messages=[message("user", text)])
    given.template_arguments_json = json.dumps(arguments or {})
    events = await world.generate(f"turn-{next(_NUMBERS)}", given=given)
    assert events[-1].HasField("end")


async def _refusal(world: World, text: str, arguments: dict[str, Any] | None = None) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _turn(world, text, arguments)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""
