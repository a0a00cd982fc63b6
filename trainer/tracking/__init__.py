"""Step records and experiment trackers."""
