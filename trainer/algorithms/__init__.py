"""The built-in algorithms, by what they have in common, and the interface of all."""
