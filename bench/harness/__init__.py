"""Processes that benchmarks and chaos tests start, and the Redis they run on."""
