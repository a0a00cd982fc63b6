"""Learns from the trajectories of a run how long answers will be."""
