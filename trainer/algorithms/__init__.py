"""The built-in algorithms, one file each."""
