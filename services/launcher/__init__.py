"""The launcher: brings every service up as a local child process and trains an agent."""
