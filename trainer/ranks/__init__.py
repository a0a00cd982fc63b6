"""The ranks of a trainer: the channel of commands, workers, device memory."""
