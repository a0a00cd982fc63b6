"""Processes of this machine: what Linux' /proc says of them, and ending those that were left."""
