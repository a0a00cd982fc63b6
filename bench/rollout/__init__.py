"""Measurements of the rollout gateway and the rollout server."""
