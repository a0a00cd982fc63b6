"""Dispatch: which rollout server gets which waiting turn."""
