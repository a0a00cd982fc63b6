"""The rollout server: one engine behind gRPC, following the weights service by itself."""
