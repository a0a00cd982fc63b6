"""The suites outside `make test`: run one and record that it passed, or the next in rotation."""
