"""Recording: what the gateway sends to the trajectory manager, in batches."""
