"""Each alert fires on real metrics of real processes, and none in a healthy run."""
