"""The discrete-event simulator of a training run."""
