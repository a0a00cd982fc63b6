"""Credentials of rollouts: an agent shows one to act on its rollout."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seamflow.rollout.v1 import rollout_service_pb2 as pb

__all__ = ["derive", "digest"]


def derive(secret: bytes, request: pb.StartRolloutRequest) -> str:
    """HMAC of the rollout's names; equal for a repeated request: StartRollout is idempotent."""
    names = "\0".join((request.run_id, request.rollout_id, request.lease_token))
    return hmac.new(secret, names.encode(), hashlib.sha256).hexdigest()


def digest(credential: str) -> str:
    """SHA-256 of a credential; the store keeps only this."""
    return hashlib.sha256(credential.encode()).hexdigest()
