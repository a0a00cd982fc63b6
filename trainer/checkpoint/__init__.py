"""Checkpoints and step dumps: files, asynchronous writing."""
