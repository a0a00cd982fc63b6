"""Transcripts of the rollouts of a run, as a table in one file."""
