"""The environments process: runs episodes of an environment against the rollout gateway."""
