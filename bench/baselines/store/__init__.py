"""Sides of the store benchmarks: our trajectory manager and the stores one could use instead."""
