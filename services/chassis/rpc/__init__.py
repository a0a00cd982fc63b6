"""gRPC server and client plumbing: interceptors, health, admin port, channels."""
