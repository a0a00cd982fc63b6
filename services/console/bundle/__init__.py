"""Chosen rollouts as a folder of pages that opens without a console."""
