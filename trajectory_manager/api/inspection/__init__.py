"""Rpcs for people who look at a run."""
