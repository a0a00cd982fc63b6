"""Whether a run learns: rules over its steps, its evaluations and its counts."""
