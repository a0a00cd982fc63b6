"""A step: its chunks of samples become commands to the ranks, and an update."""
