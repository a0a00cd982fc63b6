"""Publishing weights: the folder of a version and the two-phase publish."""
