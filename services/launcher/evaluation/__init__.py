"""Evaluation on held-out tasks: before, beside and after training."""
