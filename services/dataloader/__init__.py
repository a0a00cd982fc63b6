"""The dataloader: streams tasks to the trajectory manager's queue, resumable."""
