"""Whose fault a failed episode of verifiers is."""

from __future__ import annotations

from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentFailed

_INFRASTRUCTURE = ("ProviderError", "InterceptionError", "TunnelError", "SandboxError")


def episode_failure(episode: Any) -> EnvironmentFailed:
    """TIMEOUT for a passed deadline of verifiers, INFRASTRUCTURE for calls of the policy and for
    the boxes of programs, ENVIRONMENT for the code of tasks, tools and harness."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    message = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason given"
    kind = tokens_pb2.FAILURE_CLASS_ENVIRONMENT
    if any(error.type in _INFRASTRUCTURE for error in errors):
        kind = tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
    elif episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        kind = tokens_pb2.FAILURE_CLASS_TIMEOUT
    return EnvironmentFailed(message[-1000:], kind)


def no_gateway() -> EnvironmentFailed:
    """There is no URL at which the policy could be called."""
    return EnvironmentFailed(
        "no HTTP gateway runs: start one, and set environments.http_gateway_url",
        tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
    )
