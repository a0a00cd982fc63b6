"""An MCP server whose tool answers with what it is given, over standard input and output.

python -m tests.suites.field.servers.mcp_server
"""

from __future__ import annotations

from typing import Any

import anyio
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolResult, ListToolsResult, Tool

ANY = {"type": "object"}
STRICT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


async def _list(context: Any, request: Any) -> ListToolsResult:
    tools = [
        Tool(name="answer", input_schema=ANY),
        Tool(name="strict", input_schema=ANY, output_schema=STRICT),
    ]
    return ListToolsResult(tools=tools)


async def _call(context: Any, request: Any) -> CallToolResult:
    given = request.arguments
    if "code" in given:
        raise MCPError(code=given["code"], message=given["message"])
    return CallToolResult.model_validate(given)


async def main() -> None:
    """Serve until standard input ends."""
    server: Any = Server("field", on_list_tools=_list, on_call_tool=_call)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(main)
