"""The launcher: starts all services as local child processes and trains an agent."""
