"""Verbs that change what nodes, rollout servers and the trainer do."""
