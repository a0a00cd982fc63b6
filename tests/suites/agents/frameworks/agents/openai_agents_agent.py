"""OpenAI Agents SDK: an agent with an output type, on its default model (Responses)."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from two_tools import QUESTION, REPORT, add, weather


class Report(BaseModel):
    """The sum and the weather."""

    total: int
    weather: str


async def main() -> None:
    """Run an agent with tools, then one without."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
    set_default_openai_client(client, use_for_tracing=False)
    settings = ModelSettings(temperature=0)
    tools = [function_tool(add), function_tool(weather)]
    agent = Agent(
        name="agent",
        instructions="Answer with the tools.",
        model="policy",
        tools=tools,
        output_type=Report,
        model_settings=settings,
    )
    answer = (await Runner.run(agent, QUESTION)).final_output
    plain = Agent(name="plain", model="policy", output_type=Report, model_settings=settings)
    report = (await Runner.run(plain, REPORT)).final_output
    print(json.dumps({"answer": answer.model_dump(), "report": report.model_dump()}))


asyncio.run(main())
