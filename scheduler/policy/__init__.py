"""Allocation decisions as pure functions: placement, fair shares, lending, node split."""
