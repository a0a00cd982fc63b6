"""`make test-math`: the reward "math" beside math-verify alone; right values are known."""
