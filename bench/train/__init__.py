"""A whole training run beside TRL's `GRPOTrainer`: tokens per second, and seconds to a target."""
