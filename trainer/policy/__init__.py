"""The policy in training on one rank, and the commands it carries out."""
