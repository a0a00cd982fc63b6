"""The pool of nodes: state transactions, heartbeats and the committed state."""
