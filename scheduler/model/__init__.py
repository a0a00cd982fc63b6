"""The scheduler's records as plain data."""
