"""Checks of agents' requests: each error names the field, its value and the cure."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import seconds_of
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway import limits
from rollout.gateway.config import GatewayConfig
from services.chassis.errors import context_length_exceeded, invalid_argument
from services.chassis.rpc.fields import not_empty, not_negative, positive
from services.lib.bounds import check_sampling

_MAX_INTERVAL_SECONDS = 86_400.0


def check_start(request: pb.StartRolloutRequest) -> None:
    """Raises `ServiceError`: INVALID_ARGUMENT."""
    for name in ("run_id", "rollout_id"):
        not_empty(name, getattr(request, name))
    if request.purpose not in (tokens_pb2.PURPOSE_TRAIN, tokens_pb2.PURPOSE_EVAL):
        raise invalid_argument("purpose", request.purpose, "must be PURPOSE_TRAIN or PURPOSE_EVAL")
    is_train = request.purpose == tokens_pb2.PURPOSE_TRAIN
    if is_train != request.HasField("group"):
        cure = "give one with PURPOSE_TRAIN, and none with PURPOSE_EVAL"
        raise invalid_argument("group", request.group.group_id, cure)
    if is_train:
        not_empty("group.group_id", request.group.group_id)
        positive("group.size", request.group.size)
    if is_train and request.HasField("pinned_weight_version"):
        raise invalid_argument(
            "pinned_weight_version", request.pinned_weight_version, "only EVAL may pin a version"
        )


def check_generate(
    request: pb.GenerateRequest, vocabulary_size: int, config: GatewayConfig
) -> None:
    """Raises `ServiceError`: INVALID_ARGUMENT. Call `fill_defaults` first.

    The ids of a prompt are left to `check_ids`: there may be many.
    """
    for name in ("run_id", "rollout_id", "turn_id"):
        not_empty(name, getattr(request, name))
    if request.WhichOneof("prompt") is None:
        raise invalid_argument("prompt", None, "give messages or token_ids")
    not_negative("resume_from_offset", request.resume_from_offset)
    if request.HasField("token_ids"):
        number = len(request.token_ids.token_ids)
        if not 1 <= number <= config.max_prompt_tokens:
            cure = f"give 1 to {config.max_prompt_tokens} (max_prompt_tokens)"
            raise invalid_argument("token_ids.token_ids", f"{number} ids", cure)
    else:
        check_sizes(request.messages, config)
    check_sampling("sampling", request.sampling)
    check_ids("sampling.stop_token_ids", request.sampling.stop_token_ids, vocabulary_size)


def check_context(num_tokens: int, longest_context: int) -> None:
    """Raises `ServiceError`: CONTEXT_LENGTH_EXCEEDED, no server takes so long a prompt."""
    if longest_context and num_tokens >= longest_context:
        raise context_length_exceeded(num_tokens, longest_context)


def check_tokenize(request: pb.TokenizeRequest, config: GatewayConfig) -> None:
    """Raises `ServiceError`: INVALID_ARGUMENT, the prompt is too large."""
    if request.HasField("messages"):
        check_sizes(request.messages, config)
    size = len(request.text.encode())
    check_bytes("text", size, "max_prompt_bytes", limits.MAX_PROMPT_BYTES)


def check_sizes(given: pb.Messages, config: GatewayConfig) -> None:
    """Refuse by its size what would take long to render. Raises `ServiceError`."""
    path = "messages.messages"
    if not 1 <= len(given.messages) <= limits.MAX_MESSAGES:
        cure = f"give 1 to {limits.MAX_MESSAGES} (max_messages)"
        raise invalid_argument(path, f"{len(given.messages)} messages", cure)
    if len(given.tools) > limits.MAX_TOOLS:
        cure = f"give at most {limits.MAX_TOOLS} (max_tools)"
        raise invalid_argument("messages.tools", f"{len(given.tools)} tools", cure)
    check_bytes("messages", given.ByteSize(), "max_prompt_bytes", limits.MAX_PROMPT_BYTES)
    for i, message in enumerate(given.messages):
        size = message.ByteSize()
        check_bytes(f"{path}[{i}]", size, "max_message_bytes", limits.MAX_MESSAGE_BYTES)


def check_bytes(path: str, num_bytes: int, name: str, limit: int) -> None:
    """Raises `ServiceError`: INVALID_ARGUMENT, `path` has more bytes than setting `name` allows."""
    if num_bytes > limit:
        raise invalid_argument(path, f"{num_bytes} bytes", f"send at most {limit} ({name})")


def check_ids(name: str, ids: Sequence[int], vocabulary_size: int) -> None:
    """Raises `ServiceError`: INVALID_ARGUMENT, an id is none of the model's."""
    if not ids or (min(ids) >= 0 and max(ids) < vocabulary_size):
        return
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < vocabulary_size:
            raise invalid_argument(
                f"{name}[{i}]", token_id, f"the model's ids are 0 … {vocabulary_size - 1}"
            )


def fill_defaults(sampling: tokens_pb2.SamplingParams) -> None:
    """Set the contract's defaults where the agent left a field out, in place."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 256}
    for name, value in defaults.items():
        if not sampling.HasField(name):  # type: ignore[arg-type]
            setattr(sampling, name, value)


def interval_seconds(name: str, interval: Duration) -> float:
    """Seconds of the field `name`; 0: not set. Raises `ServiceError`: INVALID_ARGUMENT."""
    seconds = seconds_of(interval)
    if not 0.0 <= seconds <= _MAX_INTERVAL_SECONDS:
        cure = f"must be 0 to {_MAX_INTERVAL_SECONDS:g} seconds; 0 is the gateway's default"
        raise invalid_argument(name, seconds, cure)
    return seconds
