"""The tests of `make test` beside other work: `make test-busy`."""
