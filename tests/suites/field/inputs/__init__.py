"""Kinds of input, one module for each area."""
