"""The Redis client of every service: connections, pipelines, scripts."""
