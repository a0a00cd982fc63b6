"""Nodes that move between training and generation while a run goes on: `make bench-allocation`."""
