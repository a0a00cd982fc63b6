"""What one call of Generate asks, checked and in the terms of the trajectory manager."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from google.protobuf.message import Message
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.retokenization import drift_of
from services.chassis.errors import invalid_argument

__all__ = ["Prompt", "digest", "with_defaults"]


class Prompt:
    """A prompt: messages rendered by the chat template, or ids."""

    def __init__(self, request: pb.GenerateRequest, template: ChatTemplate) -> None:
        """Check the request; raises INVALID_ARGUMENT that names the field and the cure."""
        _check(request, template.vocabulary_size)
        self.template = template
        self._messages = [{"role": m.role, "content": m.content} for m in request.messages]
        self._ids = list(request.token_ids)
        self._keyed = False
        if self._messages:
            self._keyed = _is_append_only(self._messages, template)
            self._ids = [] if self._keyed else template.encode(self._messages)
        self.num_answers = sum(m["role"] == "assistant" for m in self._messages)
        """Answers of the policy that it holds; 0 for a prompt of ids, which does not tell."""

    def begin_request(self, request: pb.GenerateRequest, attempt_id: str) -> store_pb.NewTurn:
        """What opens the turn, or takes it over."""
        return store_pb.NewTurn(
            run_id=request.run_id,
            rollout_id=request.rollout_id,
            turn_id=request.turn_id,
            attempt_id=attempt_id,
            parent_turn_id=request.parent_turn_id,
            token_ids=() if self._keyed else self._ids,
            message_keys=self.template.keys(self._messages) if self._keyed else (),
            template_fingerprint=self.template.fingerprint,
            temperature=request.sampling.temperature,
            credential_digest=digest(request.credential),
        )

    def known_ids(self) -> Sequence[int]:
        """Ids of the whole prompt, where they do not depend on what the store holds; else none."""
        if self._keyed and not self.num_answers and not self._ids:
            self._ids = self.template.encode(self._messages)
        return self._ids

    def remaining_ids(self, begun: store_pb.NewTurnResult) -> list[int]:
        """Ids of the prompt after the matched prefix: this turn's environment tokens."""
        if not self._keyed:
            return self._ids[len(begun.prefix_token_ids) :]
        if not begun.num_matched_messages:
            return self._ids or self.template.encode(self._messages)
        last = begun.prefix_token_ids[-1]
        return self.template.encode_after(self._messages, begun.num_matched_messages, last)

    def drift(self, begun: store_pb.NewTurnResult) -> trajectory_pb2.Drift | None:
        """Where the prompt re-tokenises what was sampled; never where the record's ids are used."""
        if self._keyed or not begun.HasField("divergence"):
            return None
        return drift_of(self.template, self._ids, begun.divergence)

    def answer_key(self, text: str) -> str:
        """Digest of the answer as a message; empty where prompts are ids."""
        if not self._keyed:
            return ""
        return self.template.keys([{"role": "assistant", "content": text}])[0]

    def stop_token_ids(self, sampling: tokens_pb2.SamplingParams) -> frozenset[int]:
        """Ids that end the turn."""
        own = frozenset() if sampling.ignore_eos else self.template.stop_token_ids
        return own | frozenset(sampling.stop_token_ids)

    @staticmethod
    def failure(request: pb.GenerateRequest, message: str) -> store_pb.RolloutFinish:
        """What closes the rollout when the store has lost tokens that the agent has seen."""
        return store_pb.RolloutFinish(
            run_id=request.run_id,
            rollout_id=request.rollout_id,
            credential_digest=digest(request.credential),
            failure_class=tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
            failure_message=message,
        )


def _is_append_only(messages: Sequence[Mapping[str, str]], template: ChatTemplate) -> bool:
    try:
        return template.is_append_only(messages)
    except ValueError as error:
        raise invalid_argument("messages", f"{len(messages)} messages", str(error)) from error


def digest(credential: str) -> str:
    """SHA-256 of a rollout's credential; the store keeps only this."""
    return hashlib.sha256(credential.encode()).hexdigest()


def with_defaults(sampling: tokens_pb2.SamplingParams) -> None:
    """Fill in what the caller left out, in place: the contract's defaults."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 256}
    for name, value in defaults.items():
        if not sampling.HasField(name):  # type: ignore[arg-type]
            setattr(sampling, name, value)


def _check(request: pb.GenerateRequest, vocabulary_size: int) -> None:
    for name in ("run_id", "rollout_id", "turn_id"):
        _require(bool(getattr(request, name)), request, name, "must not be empty")
    if bool(request.messages) == bool(request.token_ids):
        raise invalid_argument(
            "messages", len(request.messages), "give either messages or token_ids, not both or none"
        )
    for i, message in enumerate(request.messages):
        roles = ("system", "user", "assistant", "tool")
        if message.role not in roles:
            raise invalid_argument(f"messages[{i}].role", message.role, f"must be one of {roles}")
    _require(request.resume_from_offset >= 0, request, "resume_from_offset", "must be at least 0")
    _check_ids("token_ids", request.token_ids, vocabulary_size)
    _check_sampling(request.sampling, vocabulary_size)


def _check_sampling(sampling: tokens_pb2.SamplingParams, vocabulary_size: int) -> None:
    warm = math.isfinite(sampling.temperature) and sampling.temperature >= 0
    _require(warm, sampling, "temperature", "must be at least 0", "sampling.")
    _require(0 < sampling.top_p <= 1, sampling, "top_p", "must be in (0, 1]", "sampling.")
    _require(sampling.top_k >= 0, sampling, "top_k", "must be at least 0; 0 is off", "sampling.")
    _require(0 <= sampling.min_p <= 1, sampling, "min_p", "must be in [0, 1]", "sampling.")
    _require(
        sampling.max_new_tokens >= 1, sampling, "max_new_tokens", "must be at least 1", "sampling."
    )
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocabulary_size)


def _require(holds: bool, message: Message, name: str, cure: str, path: str = "") -> None:
    if not holds:
        raise invalid_argument(path + name, getattr(message, name), cure)


def _check_ids(name: str, ids: object, vocabulary_size: int) -> None:
    for i, token_id in enumerate(ids):  # type: ignore[arg-type, var-annotated]
        if not 0 <= token_id < vocabulary_size:
            raise invalid_argument(
                f"{name}[{i}]", token_id, f"the model's ids are 0 … {vocabulary_size - 1}"
            )
