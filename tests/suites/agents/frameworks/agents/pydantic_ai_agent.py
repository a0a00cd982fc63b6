"""pydantic-ai: an agent with an output type, by Chat Completions and by Responses."""

import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from two_tools import QUESTION, add, weather


class Report(BaseModel):
    """The sum and the weather."""

    total: int
    weather: str


provider = OpenAIProvider(base_url=sys.argv[1], api_key=sys.argv[2])
reports = []
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    agent = Agent(
        kind("policy", provider=provider),
        tools=[add, weather],
        output_type=Report,
        model_settings={"temperature": 0},
    )
    reports.append(agent.run_sync(QUESTION).output.model_dump())
print(json.dumps({"answer": reports[0], "report": reports[1]}))
