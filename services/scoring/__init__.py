"""The scoring service: computes columns of samples (reference log-probs, rewards)."""
