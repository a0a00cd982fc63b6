"""Samples that cannot be trained: found, and replaced by the trajectory manager."""
