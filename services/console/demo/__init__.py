"""A recorded run, for a look at the console without a run of one's own."""
