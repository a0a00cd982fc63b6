"""Weights: watching versions, fetching, caching, relaying and swapping them."""
