"""Tasks as people have them: read in the same way for training and for evaluation."""
