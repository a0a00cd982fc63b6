"""The embedded PyTorch engine: continuous batching over a paged key/value cache."""
