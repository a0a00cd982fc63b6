"""Rewards of mathematical answers: math-verify in a child process."""
