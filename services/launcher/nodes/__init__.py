"""The nodes of a run on one machine: what each does, and its GPUs."""
