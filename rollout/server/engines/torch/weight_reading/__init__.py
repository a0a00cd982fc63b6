"""Weights of a model folder, checked against the model before any change."""
