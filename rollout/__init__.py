"""Rollout: the gateway agents talk to, and the servers that sample tokens."""
