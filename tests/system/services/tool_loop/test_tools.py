"""Tools of the tool loop: functions, MCP servers, and what the policy reads of failures."""

from __future__ import annotations

from typing import Any

import pytest
from seamflow.environment import EnvironmentClient
from seamflow.errors import PreconditionError

from bench.harness.constants import changed
from services.chassis.errors import ConfigError
from services.tool_loop.cli import build
from tests.lib.redis_server import free_port
from tests.lib.tool_loop.support import (
    HERE,
    STDIO,
    answers,
    calls,
    config,
    http_server,
    listening,
    serving,
    task,
)

FUNCTIONS = [f"{HERE}:{name}" for name in ("search", "later", "raises", "hangs", "long")]
CHILD = {"mcp_servers": {"tests": {"command": STDIO}}}


async def test_a_function_has_the_schema_of_its_signature_and_docstring() -> None:
    """Names, types, defaults, choices, descriptions."""
    async with serving(tools=FUNCTIONS) as client:
        tools = (await client.describe()).tools
        async with await client.reset(task()) as episode:
            given = {t["function"]["name"]: t["function"] for t in episode.observation.tools or ()}
    assert [tool.name for tool in tools] == ["search", "later", "raises", "hangs", "long"]
    search = given["search"]
    assert search["description"] == "Searches the archive."
    properties = search["parameters"]["properties"]
    assert properties["query"] == {
        "description": "what to look for.",
        "title": "Query",
        "type": "string",
    }
    assert properties["limit"]["default"] == 3
    assert properties["limit"]["description"] == "most results."
    assert properties["order"]["enum"] == ["new", "old"]
    assert search["parameters"]["required"] == ["query"]


async def test_calls_of_a_message_are_answered_in_order() -> None:
    """Results that are no text are JSON; ids and names are those of the calls."""
    message = calls(("search", {"query": "a", "limit": 1}), ("later", {"text": "b"}))
    async with serving(tools=FUNCTIONS) as client, await client.reset(task()) as episode:
        step = await episode.step(message)
    assert list(step.messages) == [
        {"role": "tool", "content": '["a 0 new"]', "tool_call_id": "call0", "name": "search"},
        {"role": "tool", "content": "b", "tool_call_id": "call1", "name": "later"},
    ]
    assert not step.done


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("raises", {"text": "x"}, "tool raises raised KeyError('x')"),
        ("hangs", {}, "tool hangs gave no answer within 0.2 s"),
        ("search", {}, "arguments of tool search are wrong: query: Field required. Its arguments"),
        ("search", {"query": "a", "size": 1}, "size: Extra inputs are not permitted"),
        ("search", "{", "arguments of tool search are no JSON"),
        ("search", "[1]", "arguments of tool search are no JSON object: send a JSON object"),
        ("serach", {}, "there is no tool 'serach'; did you mean search? the tools are: search,"),
    ],
)
async def test_the_policy_reads_what_went_wrong(name: str, arguments: Any, words: str) -> None:
    """And the episode goes on."""
    async with (
        serving(tools=FUNCTIONS, tool_timeout_seconds=0.2) as client,
        await client.reset(task()) as episode,
    ):
        first = await episode.step(calls((name, arguments)))
        second = await episode.step(calls(("later", {"text": "on"})))
    assert not isinstance(first.messages, str)
    assert not isinstance(second.messages, str)
    assert words in first.messages[0]["content"]
    assert first.messages[0]["content"].startswith("Error: ")
    assert second.messages[0]["content"] == "on"


async def test_a_long_answer_is_cut_off() -> None:
    """At the limit, not below it."""
    async with serving(tools=FUNCTIONS, max_tool_characters=100) as client:
        found = await answers(client, ("long", {"number": 101}), ("long", {"number": 100}))
    assert found == ["x" * 100 + "… (cut off: 101 characters)", "x" * 100]


async def check_mcp_tools(client: EnvironmentClient) -> None:
    """What holds over each transport."""
    names = [tool.name for tool in (await client.describe()).tools]
    assert names == ["add", "count", "picture", "die", "sleepy", "stuck"]
    found = await answers(
        client, ("add", {"a": 1, "b": 2}), ("add", {"a": "x"}), ("picture", {}), ("sleepy", {})
    )
    assert found[0] == "3"
    assert found[1].startswith("Error: ")
    assert "a" in found[1]
    assert found[2] == "[image: image/png, not shown]"
    assert found[3] == "Error: tool sleepy gave no answer within 1 s"


async def test_tools_of_a_child_process() -> None:
    """Over standard input and output."""
    async with serving(**CHILD, tool_timeout_seconds=1) as client:
        await check_mcp_tools(client)


async def test_tools_over_http() -> None:
    """Streamable HTTP."""
    port = free_port()
    with http_server(port) as (url, _):
        await listening(port)
        servers = {"tests": {"url": url}}
        async with serving(mcp_servers=servers, tool_timeout_seconds=1) as client:
            await check_mcp_tools(client)


async def test_a_dead_child_process_fails_the_episode_and_is_started_again() -> None:
    """Never a reward; the next episode finds a new one."""
    async with serving(**CHILD) as client:
        async with await client.reset(task()) as episode:
            with pytest.raises(PreconditionError, match=r"mcp_servers\.tests") as failed:
                await episode.step(calls(("die", {})))
        assert failed.value.metadata["failure_class"] == "INFRASTRUCTURE"
        assert await answers(client, ("add", {"a": 1, "b": 2})) == ["3"]


async def test_a_dead_http_server_fails_the_episode_until_it_is_back() -> None:
    """The loop itself goes on."""
    port = free_port()
    with http_server(port) as (url, first):
        await listening(port)
        async with serving(mcp_servers={"tests": {"url": url}}) as client:
            assert await answers(client, ("add", {"a": 1, "b": 2})) == ["3"]
            first.kill()
            first.wait()
            for _ in range(2):
                with pytest.raises(PreconditionError, match=r"mcp_servers\.tests") as failed:
                    await answers(client, ("add", {"a": 1, "b": 2}))
                assert failed.value.metadata["failure_class"] == "INFRASTRUCTURE"
            with http_server(port):
                await listening(port)
                assert await answers(client, ("add", {"a": 1, "b": 2})) == ["3"]


async def test_a_server_that_answers_nothing_any_more_fails_the_episode() -> None:
    """Unlike one whose tool is slow: that one's tools are still listed."""
    async with serving(**CHILD, tool_timeout_seconds=0.5) as client:
        async with await client.reset(task()) as episode:
            with pytest.raises(PreconditionError, match="no answer within") as failed:
                await episode.step(calls(("stuck", {})))
        assert failed.value.metadata["failure_class"] == "INFRASTRUCTURE"
        assert await answers(client, ("add", {"a": 1, "b": 2})) == ["3"]


@pytest.mark.parametrize(("per_episode", "second"), [(True, "1"), (False, "2")])
async def test_a_server_may_belong_to_its_episode(per_episode: bool, second: str) -> None:
    """With its state."""
    servers = {"tests": {"command": STDIO, "per_episode": per_episode}}
    async with serving(mcp_servers=servers) as client:
        assert await answers(client, ("count", {})) == ["1"]
        assert await answers(client, ("count", {})) == [second]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tools": ["nowhere:search"]}, r"tools\[0\] is 'nowhere:search': .*PYTHONPATH"),
        ({"tools": [f"{HERE}:serach"]}, r"tools\[0\] is .*serach"),
        ({"tools": [f"{HERE}:NOT_A_FUNCTION"]}, r"tools\[0\] = .* is 7: give a function"),
        ({"tools": [f"{HERE}:by_position"]}, r"parameter \*texts.* cannot be given by name"),
        (
            {"tools": ["tests.system.services.tool_loop.broken_module:x"]},
            "importing it raised .*no licence",
        ),
        ({"tools": [f"{HERE}:search", f"{HERE}:search"]}, "both have a tool 'search'"),
        ({"mcp_servers": {"a": {"command": "nowhere-to-be-found"}}}, r"mcp_servers.a\].*nowhere"),
        ({"mcp_servers": {"a": {"command": "false"}}}, r"mcp_servers.a\] command = 'false'"),
        ({"mcp_servers": {"a": {"url": "http://127.0.0.1:9/mcp"}}}, r"mcp_servers.a\] url ="),
        (
            {"mcp_servers": {"a": {"command": "sleep 30"}}},
            "no answer within 2 s",
        ),
    ],
)
async def test_the_start_names_setting_value_and_cure(settings: Any, words: str) -> None:
    """Before anything is served."""
    with (
        changed("services.tool_loop.tool_loop", {"start_timeout_seconds": 2.0}),
        pytest.raises(ConfigError, match=words),
    ):
        async with build(config(**settings)):
            pass


async def test_control_right_settings_start() -> None:
    """Control of the test above."""
    async with build(config(tools=FUNCTIONS, **CHILD)):
        pass
