"""Who caused the failure of an episode: it decides its failure class, never a reward."""

from __future__ import annotations

from seamflow.common.v1 import tokens_pb2
from seamflow.errors import DeadlineError, InvalidRequestError, SeamflowError

__all__ = ["ContractBroken", "failure_class"]

FailureClass = tokens_pb2.FailureClass.ValueType

_OF_ENVIRONMENTS: dict[str, FailureClass] = {
    "ENVIRONMENT": tokens_pb2.FAILURE_CLASS_ENVIRONMENT,
    "INFRASTRUCTURE": tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
    "TIMEOUT": tokens_pb2.FAILURE_CLASS_TIMEOUT,
    "CANCELLED": tokens_pb2.FAILURE_CLASS_CANCELLED,
}


class ContractBroken(Exception):  # noqa: N818 -- names the condition
    """The environment gave what its contract forbids."""


def failure_class(error: Exception) -> FailureClass:
    """The class of what ended an episode.

    ENVIRONMENT for the user's code and for requests that its values made invalid, TIMEOUT for a
    passed deadline, INFRASTRUCTURE for a server that cannot be reached or has forgotten the
    episode, and for what is unknown.
    """
    if isinstance(error, SeamflowError) and error.reason == "ENVIRONMENT_FAILED":
        given = error.metadata.get("failure_class", "")
        return _OF_ENVIRONMENTS.get(given, tokens_pb2.FAILURE_CLASS_ENVIRONMENT)
    if isinstance(error, TimeoutError | DeadlineError):
        return tokens_pb2.FAILURE_CLASS_TIMEOUT
    if isinstance(error, ContractBroken | InvalidRequestError | ValueError):
        return tokens_pb2.FAILURE_CLASS_ENVIRONMENT
    return tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
