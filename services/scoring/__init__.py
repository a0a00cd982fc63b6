"""Computes columns of samples while others still generate: reference log-probs, rewards."""
