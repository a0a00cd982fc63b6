"""`make bench-scoring`: columns of samples while others are generated."""
