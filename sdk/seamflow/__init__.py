"""seamflow: train LLM agents by reinforcement learning without making anyone wait.

This package is what agents install: the contract and a light asynchronous client.
"""

from seamflow.agent import Agent, Task
from seamflow.client import (
    BlockingClient,
    BlockingRollout,
    Check,
    Client,
    Drift,
    Rollout,
    Turn,
    WeightSpan,
)
from seamflow.common.v1.tokens_pb2 import SamplingParams
from seamflow.credentials import Credentials
from seamflow.errors import SeamflowError
from seamflow.release import __version__

__all__ = [
    "Agent",
    "BlockingClient",
    "BlockingRollout",
    "Check",
    "Client",
    "Credentials",
    "Drift",
    "Rollout",
    "SamplingParams",
    "SeamflowError",
    "Task",
    "Turn",
    "WeightSpan",
    "__version__",
]
