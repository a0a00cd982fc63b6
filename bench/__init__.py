"""Measurements, each ending in one JSON line and a table."""
