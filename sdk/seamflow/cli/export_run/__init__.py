"""`seamflow export` and `seamflow replay`."""
