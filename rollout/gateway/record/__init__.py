"""Recording: batched writes to the trajectory manager."""
