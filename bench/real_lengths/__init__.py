"""The length ranker on real generations of a small language model: `make bench-ranker`."""
