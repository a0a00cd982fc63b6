"""One per node: takes assignments from the scheduler and switches the node's processes."""
