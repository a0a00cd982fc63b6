"""Transformers of Hugging Face: their blocks, and rows packed without padding."""
