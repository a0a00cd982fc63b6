"""Weights: watched, fetched, cached, relayed and swapped in."""
