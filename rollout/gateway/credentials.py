"""Credentials of rollouts: an agent shows one to act on its rollout.

A credential is the rollout's lease token, if it has a lease, and a keyed digest of its names. The
store keeps the SHA-256 of the whole, so that any gateway can check it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import TYPE_CHECKING, Any

from services.chassis.errors import unauthenticated

if TYPE_CHECKING:
    import grpc.aio

_SCHEME = "Bearer "


def derive(secret: bytes, run_id: str, rollout_id: str, lease_token: str = "") -> str:
    """The credential of a rollout; equal for equal arguments."""
    names = "\0".join((run_id, rollout_id, lease_token))
    proof = hmac.new(secret, names.encode(), hashlib.sha256).hexdigest()
    lease = base64.urlsafe_b64encode(lease_token.encode()).decode()
    return f"{lease}.{proof}"


def lease_token(credential: str) -> str:
    """The lease token in a credential; empty: it has none, or is no credential."""
    try:
        return base64.urlsafe_b64decode(credential.partition(".")[0].encode()).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def digest(credential: str) -> str:
    """SHA-256 of a credential; the store keeps only this."""
    return hashlib.sha256(credential.encode()).hexdigest()


def bearer(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The bearer token of a call; empty: it has none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str) and value.startswith(_SCHEME):
            return value.removeprefix(_SCHEME)
    return ""


def shown(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The credential that a call shows as its bearer token.

    Raises:
        ServiceError: UNAUTHENTICATED, it shows none.
    """
    if credential := bearer(context):
        return credential
    raise unauthenticated(
        'send metadata "authorization: Bearer <credential>" with the credential that '
        "LeaseRollouts or StartRollout returned for this rollout"
    )
