"""Opaque lease tokens: they hold all that the manager needs to check a lease."""

from __future__ import annotations

import secrets

from services.chassis.errors import invalid_argument


def new_nonce() -> str:
    """A random nonce of 96 bits."""
    return secrets.token_urlsafe(12)


def task_token(rollout_id: str, nonce: str) -> str:
    """Token of a task lease."""
    return f"{nonce}.{rollout_id}"


def parse(token: str) -> tuple[str, str]:
    """(rollout_id, nonce) of a task lease.

    Raises:
        ServiceError: INVALID_ARGUMENT, no such token.
    """
    nonce, dot, rollout_id = token.partition(".")
    if not (nonce and dot and rollout_id) or len(token) > 400:
        raise invalid_argument("lease_token", token[:40], "a token from LeaseTask")
    return rollout_id, nonce


def column_token(epoch: int) -> bytes:
    """Token of a column lease."""
    return str(epoch).encode()


def parse_column(token: bytes) -> int:
    """Epoch of a column lease.

    Raises:
        ServiceError: INVALID_ARGUMENT, no such token.
    """
    if not (token.isdigit() and len(token) < 20):
        raise invalid_argument("lease_token", token[:40], "a token from LeaseColumn")
    return int(token)


def step_token(step: int, epoch: int) -> bytes:
    """Token of a sample lease."""
    return f"{step}.{epoch}".encode()


def parse_step(token: bytes) -> tuple[int, int]:
    """(step, epoch) of a sample lease.

    Raises:
        ServiceError: INVALID_ARGUMENT, no such token.
    """
    step, _, epoch = token.partition(b".")
    if not (step.isdigit() and epoch.isdigit() and len(token) < 40):
        raise invalid_argument("lease_token", token[:40], "a token from LeaseSamples")
    return int(step), int(epoch)
