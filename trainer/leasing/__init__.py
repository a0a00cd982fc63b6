"""The batch of a step: waited for, leased, and checked."""
