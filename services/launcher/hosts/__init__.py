"""The hosts of a run: certificates for calls between them, what each starts, how they join."""
