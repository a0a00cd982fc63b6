"""Measurements of whole quickstart runs."""
