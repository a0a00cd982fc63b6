"""The dataloader: streams tasks to the trajectory manager as fast as it takes them, resumable."""
