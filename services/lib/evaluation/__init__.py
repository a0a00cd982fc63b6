"""Evaluations as the evaluator and the launcher know them."""
