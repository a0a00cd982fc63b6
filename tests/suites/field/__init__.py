"""Inputs that people really send, by kind, with their right values."""
