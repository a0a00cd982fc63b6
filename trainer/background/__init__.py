"""What goes on beside the steps: checkpoints and new weights are written."""
