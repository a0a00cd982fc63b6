"""Six ways to run reinforcement learning on the same nodes, compared on emulated GPUs."""
