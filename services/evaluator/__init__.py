"""Evaluates a run on held-out tasks: before, beside and after training."""
