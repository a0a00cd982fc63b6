"""Reference pages generated from the code: `python -m tools.reference`."""
