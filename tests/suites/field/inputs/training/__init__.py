"""What the trainer, scorers and engines compute, and what is kept of it."""
