"""A language model of 135 million parameters, trained and measured: `make bench-model`."""
