"""The built-in scorers, one file each; `loading.py` loads their models."""
