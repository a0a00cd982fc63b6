"""Whole training runs compared with TRL's `GRPOTrainer`: tokens per second, seconds to a target."""
