"""Weight versions as files: folder names, shard chunks, deltas, sending."""
