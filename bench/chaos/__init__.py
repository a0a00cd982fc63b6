"""Chaos: real processes are killed, frozen, cut off; then all is counted.

Of the trajectory store (`store.py`): what was acknowledged is written down outside the system
(`history.py`) and held against what the store gives back in the end (`checker.py`). Of the
scheduler and its nodes (`scheduler.py`): who held which device when, and whose effects were
accepted, is written down (`scheduler_ledger.py`) and held against what may be
(`scheduler_checker.py`). Of the trainer (`training.py`): what it trained on, and its weights and
optimizer state, are held against a run that nothing disturbed (`training_checker.py`,
`training_weights.py`). Every promise has a negative control: one safety rule is switched off, and
the same checker must find the violation.
"""
