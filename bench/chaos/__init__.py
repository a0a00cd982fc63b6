"""Chaos of the trajectory store: real processes are killed, frozen, cut off; then all is counted.

What was acknowledged is written down outside the system (`history.py`) and held against what the
store gives back in the end (`checker.py`). Every promise has a negative control: one safety rule is
switched off, and the same checker must find the violation.
"""
