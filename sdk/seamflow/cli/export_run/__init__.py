"""`seamflow export`."""
