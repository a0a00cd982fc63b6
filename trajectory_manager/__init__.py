"""Trajectory manager: the durable, fenced record of every token, and the step ledger."""
