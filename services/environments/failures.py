"""Who caused the failure of an episode: it decides its failure class, never a reward."""

from __future__ import annotations

from seamflow.common.v1 import tokens_pb2
from seamflow.errors import DeadlineError, ExhaustedError, InvalidRequestError, SeamflowError

_OF_ENVIRONMENTS: dict[str, tokens_pb2.FailureClass.ValueType] = {
    "ENVIRONMENT": tokens_pb2.FAILURE_CLASS_ENVIRONMENT,
    "INFRASTRUCTURE": tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
    "TIMEOUT": tokens_pb2.FAILURE_CLASS_TIMEOUT,
    "CANCELLED": tokens_pb2.FAILURE_CLASS_CANCELLED,
}


def failure_class(error: Exception) -> tokens_pb2.FailureClass.ValueType:
    """The class of what ended an episode.

    ENVIRONMENT for the user's code and for requests that its values made invalid or too large,
    TIMEOUT for a passed deadline, INFRASTRUCTURE for a server that cannot be reached or has
    forgotten the episode, and for what is unknown.
    """
    if isinstance(error, SeamflowError) and error.reason == "ENVIRONMENT_FAILED":
        given = error.metadata.get("failure_class", "")
        return _OF_ENVIRONMENTS.get(given, tokens_pb2.FAILURE_CLASS_ENVIRONMENT)
    if isinstance(error, TimeoutError | DeadlineError):
        return tokens_pb2.FAILURE_CLASS_TIMEOUT
    if isinstance(error, ExhaustedError) and error.retry_after is None:
        return tokens_pb2.FAILURE_CLASS_ENVIRONMENT  # an observation that no message takes
    if isinstance(error, InvalidRequestError | ValueError):
        return tokens_pb2.FAILURE_CLASS_ENVIRONMENT
    return tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
