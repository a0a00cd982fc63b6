"""Runs on a Slurm cluster: the batch script of a configuration."""
