"""Training runs whose agents are the clients of examples/clients, in other languages."""
