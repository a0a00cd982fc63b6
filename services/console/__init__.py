"""The console: pages that show what a run does, what its model writes, and why it waits."""
