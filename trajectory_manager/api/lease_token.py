"""Opaque lease tokens: they hold all that the manager needs to check a lease.

A text that is none raises `ServiceError` INVALID_ARGUMENT.
"""

from __future__ import annotations

import base64
import hashlib

from services.chassis.errors import invalid_argument


def nonce(request_id: str, index: int = 0) -> str:
    """The nonce of 96 bits of the `index`-th lease of a request: the same for a repeated one."""
    digest = hashlib.sha256(f"{request_id}/{index}".encode()).digest()
    return base64.urlsafe_b64encode(digest[:12]).decode()


def task_token(rollout_id: str, nonce: str) -> str:
    return f"{nonce}.{rollout_id}"


def parse(token: str) -> tuple[str, str]:
    """(rollout_id, nonce) of a task lease."""
    nonce, dot, rollout_id = token.partition(".")
    if not (nonce and dot and rollout_id) or len(token) > 400:
        raise invalid_argument("lease_token", token[:40], "a token from LeaseTasks")
    return rollout_id, nonce


def column_token(epoch: int) -> str:
    return str(epoch)


def parse_column(token: str) -> int:
    if not (_is_number(token) and len(token) < 20):
        raise invalid_argument("lease_token", token[:40], "a token from LeaseColumn")
    return int(token)


def step_token(step: int, epoch: int) -> str:
    return f"{step}.{epoch}"


def parse_step(token: str) -> tuple[int, int]:
    """(step, epoch) of a sample lease."""
    step, _, epoch = token.partition(".")
    if not (_is_number(step) and _is_number(epoch) and len(token) < 40):
        raise invalid_argument("lease_token", token[:40], "a token from LeaseSamples")
    return int(step), int(epoch)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
