"""Findings of why-stuck that take a module of their own."""
