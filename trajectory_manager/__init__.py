"""Trajectory manager: the durable, fenced record of every token, and who trains on it when."""
