"""Servers that checks call, kept for all inputs."""
