"""LangChain: an agent with tools, and a model with structured output."""

import json
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from two_tools import QUESTION, REPORT, add, weather


class Report(BaseModel):
    """The sum and the weather."""

    total: int
    weather: str


model = ChatOpenAI(model="policy", base_url=sys.argv[1], api_key=sys.argv[2], temperature=0)
agent = create_agent(model, [add, weather])
messages = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"]
reports = [
    model.with_structured_output(Report, method=method).invoke(REPORT).model_dump()
    for method in ("json_schema", "function_calling")
]
assert reports[0] == reports[1], reports
print(json.dumps({"answer": messages[-1].content, "report": reports[0]}))
