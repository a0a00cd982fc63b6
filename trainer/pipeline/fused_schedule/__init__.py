"""Schedules for the pipelines of several models on the same nodes (RLHFuse, arXiv 2409.13221)."""
