"""Evaluation from the side of the launcher: starts the evaluator, and tells what it says."""
