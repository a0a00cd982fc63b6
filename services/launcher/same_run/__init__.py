"""A run stays what it began as: its rules, its model, and one process at a time."""
