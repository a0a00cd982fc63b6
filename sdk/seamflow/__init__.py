"""seamflow: train LLM agents by reinforcement learning without making anyone wait.

This package is what agents install: the contract and a light asynchronous client.
"""

from seamflow.agent import Agent, Task
from seamflow.client import Client, Drift, Rollout, Turn, WeightSpan
from seamflow.credentials import Credentials
from seamflow.errors import SeamflowError
from seamflow.release import __version__

__all__ = [
    "Agent",
    "Client",
    "Credentials",
    "Drift",
    "Rollout",
    "SeamflowError",
    "Task",
    "Turn",
    "WeightSpan",
    "__version__",
]
