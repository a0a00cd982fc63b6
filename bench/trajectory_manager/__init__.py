"""Measurements of the trajectory manager and its store."""
