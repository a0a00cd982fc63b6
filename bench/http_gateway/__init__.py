"""Measurements of the HTTP gateway."""
