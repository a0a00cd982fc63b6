"""Weight versions as files: folder names, shard chunks, sending."""
