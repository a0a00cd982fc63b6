"""smolagents: ToolCallingAgent, and a model's answer with a schema."""

import json
import sys

from smolagents import ChatMessage, OpenAIServerModel, ToolCallingAgent, tool
from two_tools import QUESTION, REPORT, add, weather

SCHEMA = {
    "type": "object",
    "properties": {"total": {"type": "integer"}, "weather": {"type": "string"}},
    "required": ["total", "weather"],
}

model = OpenAIServerModel("policy", api_base=sys.argv[1], api_key=sys.argv[2], temperature=0)
agent = ToolCallingAgent(tools=[tool(add), tool(weather)], model=model, verbosity_level=0)
answer = agent.run(QUESTION, max_steps=5)
report = model.generate(
    [ChatMessage(role="user", content=REPORT)],
    response_format={"type": "json_schema", "json_schema": {"name": "Report", "schema": SCHEMA}},
)
print(json.dumps({"answer": answer, "report": json.loads(report.content)}))
