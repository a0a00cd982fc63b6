"""The Redis of a one-machine run: its program, and the private server."""
