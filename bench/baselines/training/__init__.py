"""Sides of the training benchmarks: TRL."""
