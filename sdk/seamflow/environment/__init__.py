"""Environments: a class with `reset` and `step`, or a reward function, becomes a server.

class Guess:
    def reset(self, task, seed): ...
    def step(self, message): ...

serve(Guess, port=50070)    # or: python -m seamflow.environment --environment my_module:Guess
"""

from seamflow.client.turn import Task
from seamflow.environment.environment import (
    CapacityReached,
    Endpoint,
    EnvironmentFailed,
    Observation,
    SelfDrivingEnvironment,
    Step,
    SteppedEnvironment,
)
from seamflow.environment.environment_client import EnvironmentClient, OpenEpisode, Transcript
from seamflow.environment.environment_server import EnvironmentServerConfig, serve, serving

__all__ = [
    "CapacityReached",
    "Endpoint",
    "EnvironmentClient",
    "EnvironmentFailed",
    "EnvironmentServerConfig",
    "Observation",
    "OpenEpisode",
    "SelfDrivingEnvironment",
    "Step",
    "SteppedEnvironment",
    "Task",
    "Transcript",
    "serve",
    "serving",
]
