"""The small processes, one folder each, and the chassis that all share."""
