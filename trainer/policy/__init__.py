"""The policy in training on one rank."""
