"""Drivers of the systems that benchmarks compare seamflow with, one file each."""
