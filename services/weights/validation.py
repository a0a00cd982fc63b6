"""Validation of requests; strict, because names become paths."""

from __future__ import annotations

import re
from collections.abc import Sequence

from seamflow.weights.v1.weight_service_pb2 import WeightFile

from services.chassis.errors import invalid_argument
from services.weights.store_interface import Scope

__all__ = ["check_files", "not_negative", "positive", "required", "scope_of"]

DEFAULT_MODEL = "policy"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_NAME_CURE = "use 1 to 128 of A-Z a-z 0-9 . _ -, not beginning with . or -"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def scope_of(run_id: str, model: str) -> Scope:
    """The scope of a request; an empty model is "policy".

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    model = model or DEFAULT_MODEL
    return Scope(run_id=_named("run_id", run_id), model=_named("model", model))


def check_files(files: Sequence[WeightFile]) -> None:
    """Check that each file has a unique plain name, a size and a digest.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if not files:
        raise invalid_argument("files", "[]", "name every file of the version's folder")
    seen = set[str]()
    for index, file in enumerate(files):
        field = f"files[{index}]"
        if _named(f"{field}.name", file.name) in seen:
            raise invalid_argument(f"{field}.name", file.name, "name each file once")
        seen.add(file.name)
        not_negative(f"{field}.num_bytes", file.num_bytes)
        if not _DIGEST.fullmatch(file.sha256):
            cure = "give the SHA-256 as 64 lower-case hex digits"
            raise invalid_argument(f"{field}.sha256", file.sha256, cure)


def positive(field: str, value: int) -> int:
    """`value`, checked to be at least 1.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if value < 1:
        raise invalid_argument(field, value, "it must be at least 1")
    return value


def not_negative(field: str, value: int) -> int:
    """`value`, checked to be at least 0.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if value < 0:
        raise invalid_argument(field, value, "it must be at least 0")
    return value


def required(field: str, value: str) -> str:
    """`value`, checked to have 1 to 256 characters.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if not 1 <= len(value) <= 256:
        raise invalid_argument(field, value[:32], "it must have 1 to 256 characters")
    return value


def _named(field: str, value: str) -> str:
    if not _NAME.fullmatch(value):
        raise invalid_argument(field, value[:64], _NAME_CURE)
    return value
