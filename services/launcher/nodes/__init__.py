"""The nodes of a run: what each does, on which host, and its GPUs."""
