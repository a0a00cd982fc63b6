"""The rollout server: one engine behind gRPC that watches the weights service."""
