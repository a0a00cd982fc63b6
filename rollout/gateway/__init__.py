"""The rollout gateway: every token between an agent and the model passes here, recorded first."""
