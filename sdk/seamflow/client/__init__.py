"""The client of an agent: lease or start rollouts, generate turns, finish with a reward."""

from seamflow.client.blocking import BlockingClient, BlockingRollout
from seamflow.client.client import Client, Observer
from seamflow.client.messages import Message, Tool, ToolChoice
from seamflow.client.rollout_client import Rollout
from seamflow.client.turn import Check, Drift, Turn, WeightSpan

__all__ = [
    "BlockingClient",
    "BlockingRollout",
    "Check",
    "Client",
    "Drift",
    "Message",
    "Observer",
    "Rollout",
    "Tool",
    "ToolChoice",
    "Turn",
    "WeightSpan",
]
