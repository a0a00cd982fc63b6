"""The built-in scorers, one file each; `loading.py` is how they get their models."""
